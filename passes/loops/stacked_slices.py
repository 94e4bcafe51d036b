"""Vectorize what the iterations of an unrolled loop compute from their own slices of the inputs.

x[:, 0] * y[:, 0], x[:, 1] * y[:, 1], ...  ->  z = x * y, read as z[:, 0], z[:, 1], ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from ..partition.reachability import Reachability
from ..rewrites.emit import emit
from .stacked_operators import Stacked, batched_arguments, batching_rule, is_computation
from .stacked_values import MIN_STEPS, StackedValues, stacking_key
from .tensor_slices import SliceOf, selected_slice

aten = torch.ops.aten


@dataclasses.dataclass(eq=False)
class _StepFamily:
    """The same operator in all iterations, each applied to the slices of its own iteration.

    Attributes:
        source: the tensor that they select from, and along which dimension; None where they are
            computed from other families.
        steps: iteration -> its nodes; several where the graph does the same twice.
        stack: the stacked values once they were made, and their first iteration.
    """

    source: tuple[fx.Node, int] | None
    steps: dict[int, list[fx.Node]] = dataclasses.field(default_factory=dict)
    stack: tuple[fx.Node, int] | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        return [node for step in sorted(self.steps) for node in self.steps[step]]


# To which family a node belongs, in which iteration.
_Steps = dict[fx.Node, tuple[_StepFamily, int]]


def vectorize_slices(graph: fx.Graph, stacked: StackedValues) -> bool:
    """Rewrite the graph; True if anything was vectorized."""
    families, of = _families(graph)
    found = [each for each in families if each.source is None and is_computation(each.nodes[0])]
    found = [each for each in found if _is_loop(each) and stacked.fits(tuple(each.nodes))]
    # In the order of the graph, in which those come first that others are computed from.
    found.sort(key=lambda each: min(each.nodes))
    vectorized = [_vectorize(graph, each, of, stacked) for each in found]
    return any(vectorized)


def _is_loop(family: _StepFamily) -> bool:
    steps = sorted(family.steps)
    return len(steps) >= MIN_STEPS and steps[-1] - steps[0] == len(steps) - 1


def _families(graph: fx.Graph) -> tuple[list[_StepFamily], _Steps]:
    """All families, and for each of their nodes the family and the iteration."""
    found: dict[Hashable, _StepFamily] = {}
    of: _Steps = {}
    if not any(map(selected_slice, graph.nodes)):
        return [], of
    reach = Reachability.of(graph)
    for node in graph.nodes:
        read = [each for each in node.all_input_nodes if each in of]
        steps = {of[each][1] for each in read}
        if len(steps) == 1 and batching_rule(node) and all(map(stacking_key, [node, *read])):
            source, (step,) = None, steps
            key = _key(node, of, reach)
        elif place := selected_slice(node):
            source, step = (place.tensor, place.dim), place.step
            key = source
        else:
            continue
        family = found.setdefault(key, _StepFamily(source))
        family.steps.setdefault(step, []).append(node)
        of[node] = family, step
    return [*found.values()], of


def _key(node: fx.Node, of: _Steps, reach: Reachability) -> Hashable:
    """Equal for nodes of one family: same operator, corresponding operands, needed by the same
    graphs.
    """

    def known(argument: Any) -> Hashable:
        if isinstance(argument, fx.Node):
            return of[argument][0] if argument in of else argument
        return repr(argument)

    needed = node in reach.forward, node in reach.gradient, node in reach.urgent
    arguments = tuple(map(known, batched_arguments(node)))
    return node.target, arguments, repr(node.kwargs), stacking_key(node), needed


def _vectorize(graph: fx.Graph, family: _StepFamily, of: _Steps, stacked: StackedValues) -> bool:
    nodes, first = family.nodes, min(family.steps)
    if not _is_ready(family, of) or not all(n.meta["val"].is_contiguous() for n in nodes):
        return False
    with graph.inserting_before(min(nodes)):
        stack = _stacked(family, first, len(family.steps), of, stacked)
        if not stack.meta["val"].is_contiguous():
            stack = emit(
                graph, nodes[0], aten.clone.default, stack, memory_format=torch.contiguous_format
            )
    family.stack = stack, first
    for step, same in family.steps.items():
        for node in same:
            with graph.inserting_before(node):
                view = emit(graph, node, aten.select.int, stack, 0, step - first)
            node.replace_all_uses_with(view)
            of[view] = family, step
    return True


def _is_ready(family: _StepFamily, of: _Steps) -> bool:
    """Whether the families that it is computed from are stacked."""
    read = {id(of[each][0]): of[each][0] for each in family.nodes[0].all_input_nodes if each in of}
    return all(
        each.source is not None
        or each.stack is not None
        or (not is_computation(each.nodes[0]) and _is_ready(each, of))
        for each in read.values()
    )


def _stacked(
    family: _StepFamily, first: int, count: int, of: _Steps, stacked: StackedValues
) -> fx.Node:
    """The stacked values of ``count`` iterations from ``first`` on."""
    node = family.nodes[0]
    if family.source:
        return stacked.slice(SliceOf(*family.source, first), count, node)
    if family.stack:
        stack, start = family.stack
        return stacked.slice(SliceOf(stack, 0, first - start), count, node)
    arguments = [
        Stacked(_stacked(of[each][0], first, count, of, stacked))
        if isinstance(each, fx.Node) and each in of
        else each
        for each in batched_arguments(node)
    ]
    return stacked.apply(node, arguments)
