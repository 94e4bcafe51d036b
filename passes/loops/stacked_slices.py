"""What the steps of an unrolled loop compute of their own slices alone, computed for all steps.

x[:, 0] * y[:, 0], x[:, 1] * y[:, 1], ...  ->  z = x * y, read as z[:, 0], z[:, 1], ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from ..partition.reachability import Reach
from ..rewrites.emit import emit
from .stacked_operators import Whole, arguments_of, is_computing, lift_of
from .stacked_values import STEPS, Place, Wholes, selected, traits

aten = torch.ops.aten


@dataclasses.dataclass(eq=False)
class _Family:
    """Nodes that do the same, each to the slices of its own step.

    Attributes:
        source: what they are selected from, and along which dimension; None where they are
            computed from other families.
        steps: step -> its nodes; several where the graph does the same twice.
        whole: once it was made, and the step that it begins with.
    """

    source: tuple[fx.Node, int] | None
    steps: dict[int, list[fx.Node]] = dataclasses.field(default_factory=dict)
    whole: tuple[fx.Node, int] | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        return [node for step in sorted(self.steps) for node in self.steps[step]]


# To which family a node belongs, at which step.
_Places = dict[fx.Node, tuple[_Family, int]]


def lift_selected(graph: fx.Graph, wholes: Wholes) -> bool:
    """True if there was anything to lift."""
    families, of = _families(graph)
    found = [each for each in families if each.source is None and is_computing(each.nodes[0])]
    found = [each for each in found if _is_loop(each) and wholes.fits(tuple(each.nodes))]
    # In the order of the graph, in which those come first that others are computed from.
    found.sort(key=lambda each: min(each.nodes))
    lifted = [_lift(graph, each, of, wholes) for each in found]
    return any(lifted)


def _is_loop(family: _Family) -> bool:
    steps = sorted(family.steps)
    return len(steps) >= STEPS and steps[-1] - steps[0] == len(steps) - 1


def _families(graph: fx.Graph) -> tuple[list[_Family], _Places]:
    """All families, and for their nodes to which they belong, at which step."""
    found: dict[Hashable, _Family] = {}
    of: _Places = {}
    reach = Reach.of(graph)
    for node in graph.nodes:
        read = [each for each in node.all_input_nodes if each in of]
        steps = {of[each][1] for each in read}
        if len(steps) == 1 and lift_of(node) and all(map(traits, [node, *read])):
            source, (step,) = None, steps
            key = _key(node, of, reach)
        elif place := selected(node):
            source, step = (place.tensor, place.dim), place.step
            key = source
        else:
            continue
        family = found.setdefault(key, _Family(source))
        family.steps.setdefault(step, []).append(node)
        of[node] = family, step
    return [*found.values()], of


def _key(node: fx.Node, of: _Places, reach: Reach) -> Hashable:
    """The same for nodes that do the same, each at its step, and are needed for the same."""

    def known(argument: Any) -> Hashable:
        if isinstance(argument, fx.Node):
            return of[argument][0] if argument in of else argument
        return repr(argument)

    needed = node in reach.forward, node in reach.gradient, node in reach.urgent
    arguments = tuple(map(known, arguments_of(node)))
    return node.target, arguments, repr(node.kwargs), traits(node), needed


def _lift(graph: fx.Graph, family: _Family, of: _Places, wholes: Wholes) -> bool:
    nodes, first = family.nodes, min(family.steps)
    if not _is_ready(family, of) or not all(n.meta["val"].is_contiguous() for n in nodes):
        return False
    with graph.inserting_before(min(nodes)):
        whole = _whole(family, first, len(family.steps), of, wholes)
        if not whole.meta["val"].is_contiguous():
            whole = emit(
                graph, nodes[0], aten.clone.default, whole, memory_format=torch.contiguous_format
            )
    family.whole = whole, first
    for step, same in family.steps.items():
        for node in same:
            with graph.inserting_before(node):
                view = emit(graph, node, aten.select.int, whole, 0, step - first)
            node.replace_all_uses_with(view)
            of[view] = family, step
    return True


def _is_ready(family: _Family, of: _Places) -> bool:
    """Whether all that it is computed from was lifted."""
    read = {id(of[each][0]): of[each][0] for each in family.nodes[0].all_input_nodes if each in of}
    return all(
        each.source is not None
        or each.whole is not None
        or (not is_computing(each.nodes[0]) and _is_ready(each, of))
        for each in read.values()
    )


def _whole(family: _Family, first: int, count: int, of: _Places, wholes: Wholes) -> fx.Node:
    """The values of ``count`` steps from ``first`` on."""
    node = family.nodes[0]
    if family.source:
        return wholes.slice(Place(*family.source, first), count, node)
    if family.whole:
        whole, start = family.whole
        return wholes.slice(Place(whole, 0, first - start), count, node)
    arguments = [
        Whole(_whole(of[each][0], first, count, of, wholes))
        if isinstance(each, fx.Node) and each in of
        else each
        for each in arguments_of(node)
    ]
    return wholes.apply(node, arguments)
