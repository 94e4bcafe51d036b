"""Vectorize unrolled loops: one batched operator for what all iterations compute independently.

A Python loop over a sequence is in the graph once for each iteration. The recurrence itself, in
which an iteration needs the state of the one before, stays as it is. But what an iteration computes
of its own slices of the inputs, or of its state only to be stacked with that of the others, becomes
one operator over all iterations: fewer nodes to cut, to compile and to launch, and one saved tensor
in place of many. Mamba's joint graph has half of the nodes.

    stack([state_t @ c[:, t] for t in ...])  ->  stack(states) @ c
    x[:, 0] * y[:, 0], x[:, 1] * y[:, 1], ...  ->  z = x * y, read as z[:, 0], z[:, 1], ...

The values of one operator at consecutive iterations are stacked along a new first dimension
(``stacked_values.py``), and a batching rule applies the operator to the stack
(``stacked_operators.py``). No stack is larger than the largest tensor of the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import is_view
from ..graph import SplitProgram, calls, tensor_of
from ..partition.reachability import Reachability
from ..rewrites.emit import dead_code, emit, erase_unread
from .stacked_operators import (
    Stacked,
    batched_arguments,
    batching_rule,
    is_computation,
)
from .stacked_values import (
    MIN_STEPS,
    SliceOf,
    StackedValues,
    StackPlan,
    StepValues,
    laid_out,
    selected_slice,
    stacking_key,
)

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


aten = torch.ops.aten


def vectorize_loops(program: SplitProgram) -> bool:
    """Rewrite the joint graph; True if anything was vectorized."""
    graph = program.joint.graph
    stacked = StackedValues(graph)
    together = [
        _vectorize_laid_out(graph, node, stacked) for node in [*calls(graph)] if laid_out(node)
    ]
    for stack, values in stacked.made:
        _read_from_stacked(graph, stack, values)
    apart = vectorize_slices(graph, stacked)
    dead_code(program)
    return apart or any(together)


def _vectorize_laid_out(graph: fx.Graph, node: fx.Node, stacked: StackedValues) -> bool:
    """Vectorize the operators whose results a node stacks or concatenates."""
    if not node.meta["val"].is_contiguous():
        return False
    dim, values = laid_out(node) or (0, [])
    rooms = [each for each in node.all_input_nodes if each.users.keys() == {node}]
    dying = frozenset([node, *rooms])
    plans: dict[int, StackPlan] = {}
    for start, run in _runs(values):
        plan = stacked.vectorized(run, node, dying)
        if plan and plan.computes and len(plan.made) <= 1:
            plans[start] = plan
    if not plans:
        return False
    result = _put_together(graph, node, dim, plans, stacked)
    node.replace_all_uses_with(result)
    stacked.forget(erase_unread(graph, node))
    return True


def _runs(values: list[fx.Node | None]) -> list[tuple[int, StepValues]]:
    """Runs of consecutive values that the same operator makes, and where they start."""
    found: list[tuple[int, list[fx.Node]]] = []
    for index, value in enumerate(values):
        if value is None:
            continue
        if found:
            start, run = found[-1]
            if start + len(run) == index and run[0].target == value.target:
                run.append(value)
                continue
        found.append((index, [value]))
    return [(start, tuple(run)) for start, run in found if len(run) >= MIN_STEPS]


def _put_together(
    graph: fx.Graph, node: fx.Node, dim: int, plans: dict[int, StackPlan], stacked: StackedValues
) -> fx.Node:
    """The stack or concatenation that a node makes, with some runs of it vectorized as planned."""
    ends = {start: start + len(plan.values) for start, plan in plans.items()}
    vectorized = {start: stacked.make(plan, node) for start, plan in plans.items()}
    parts: list[fx.Node] = []
    at = 0
    given: Any = node.args[0]
    is_stack = node.target is aten.stack.default
    with graph.inserting_before(node):
        for part in given:
            start = at
            at += 1 if is_stack else part.meta["val"].shape[dim]
            if start in vectorized:
                stack = vectorized[start]
                order = [*range(1, stack.meta["val"].ndim)]
                order.insert(dim, 0)
                parts.append(emit(graph, node, aten.permute.default, stack, order))
            elif any(first <= start < end for first, end in ends.items()):
                continue
            elif is_stack:
                parts.append(emit(graph, node, aten.unsqueeze.default, part, dim))
            else:
                parts.append(part)
        alone = len(parts) == 1
        found = parts[0] if alone else emit(graph, node, aten.cat.default, parts, dim)
        if found.meta["val"].is_contiguous():
            return found
        return emit(graph, node, aten.clone.default, found, memory_format=torch.contiguous_format)


def _read_from_stacked(graph: fx.Graph, stack: fx.Node, values: StepValues) -> None:
    """Have later readers of a value read its stack, so that only the stack need be saved."""
    for index, value in enumerate(values):
        with graph.inserting_after(stack):
            view = emit(graph, value, aten.select.int, stack, 0, index)
        if view.meta["val"].stride() == value.meta["val"].stride():
            _redirect(graph, value, stack, view)
        if not view.users:
            graph.erase_node(view)


def _redirect(graph: fx.Graph, value: fx.Node, behind: fx.Node, view: fx.Node) -> None:
    for user in [*value.users]:
        if behind < user and user.op != "output":
            user.replace_input_with(value, view)
        elif is_view(user) and tensor_of(user) is not None and user < behind:
            with graph.inserting_after(view):
                copy = graph.node_copy(user, lambda each: view if each is value else each)
            _redirect(graph, user, behind, copy)
            if not copy.users:
                graph.erase_node(copy)
