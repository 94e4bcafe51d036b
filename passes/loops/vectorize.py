"""Vectorize unrolled loops: one batched operator for what iterations compute to be put together.

A Python loop over a sequence is in the graph once for each iteration. The recurrence itself, in
which an iteration needs the state of the one before, stays as it is. But what an iteration computes
of its state only to be stacked or concatenated with that of the others becomes one operator over
all iterations: fewer nodes to cut, to compile and to launch. Mamba's joint graph has half of the
nodes.

    stack([state_t @ c[:, t] for t in ...])  ->  stack(states) @ c

The values of one operator at consecutive iterations are stacked along a new first dimension
(``stacked_values.py``), and the operator is applied to the stack. No stack is larger than the
largest tensor of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import is_view
from ..graph import SplitGraphs, calls, tensor_of
from ..rewrites.emit import dead_code, emit, erase_unread
from .stacked_values import (
    MIN_STEPS,
    StackedValues,
    StackPlan,
    StepValues,
    laid_out,
)

aten = torch.ops.aten


def vectorize_loops(program: SplitGraphs) -> bool:
    """Rewrite the joint graph; True if anything was vectorized."""
    graph = program.joint.graph
    stacked = StackedValues(graph)
    together = [
        _vectorize_laid_out(graph, node, stacked) for node in [*calls(graph)] if laid_out(node)
    ]
    for stack, values in stacked.made:
        _read_from_stacked(graph, stack, values)
    dead_code(program)
    return any(together)


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
