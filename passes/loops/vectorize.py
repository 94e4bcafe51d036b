"""What the steps of an unrolled loop need not do one by one, done once for all steps.

A loop over a sequence written in Python is in a graph as often as the sequence is long. Where one
step waits for another (the recurrence itself) that is how it runs. But what a step makes of its
own slices alone, and what is made of its state only to be laid side by side with that of other
steps, is one operator over all of them: fewer nodes to cut, to compile and to launch, and one
tensor to save in place of many.

    stack([state_t @ c[:, t] for t in ...])  ->  stack(states) @ c

Values of one thing at all steps are a *family*, the tensor that holds them is its *whole*
(``whole.py``). No whole is larger than the largest tensor that the graph holds anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import is_view
from ..graph import Program, calls, tensor_of
from ..rewrites.dead_code import dead_code
from ..rewrites.emit import emit, erase_unread
from .stacked_slices import lift_selected
from .stacked_values import STEPS, Family, Plan, Wholes, laid

aten = torch.ops.aten


def lift(program: Program) -> bool:
    """Rewrite the joint graph; True if there was anything to lift."""
    graph = program.joint.graph
    wholes = Wholes(graph)
    together = [_lift_laid(graph, node, wholes) for node in [*calls(graph)] if laid(node)]
    for whole, values in wholes.made:
        _read_later(graph, whole, values)
    apart = lift_selected(graph, wholes)
    dead_code(program)
    return apart or any(together)


def _lift_laid(graph: fx.Graph, node: fx.Node, wholes: Wholes) -> bool:
    """Lift what makes the values that are laid side by side."""
    if not node.meta["val"].is_contiguous():
        return False
    dim, values = laid(node) or (0, [])
    rooms = [each for each in node.all_input_nodes if each.users.keys() == {node}]
    dying = frozenset([node, *rooms])
    plans: dict[int, Plan] = {}
    for start, run in _runs(values):
        plan = wholes.lifted(run, node, dying)
        if plan and plan.computes and len(plan.made) <= 1:
            plans[start] = plan
    if not plans:
        return False
    result = _put_together(graph, node, dim, plans, wholes)
    node.replace_all_uses_with(result)
    wholes.forget(erase_unread(graph, node))
    return True


def _runs(values: list[fx.Node | None]) -> list[tuple[int, Family]]:
    """Consecutive values that the same operator makes, and where they start."""
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
    return [(start, tuple(run)) for start, run in found if len(run) >= STEPS]


def _put_together(
    graph: fx.Graph, node: fx.Node, dim: int, plans: dict[int, Plan], wholes: Wholes
) -> fx.Node:
    """What a node lays side by side, with some of it as planned."""
    ends = {start: start + len(plan.values) for start, plan in plans.items()}
    lifted = {start: wholes.make(plan, node) for start, plan in plans.items()}
    parts: list[fx.Node] = []
    at = 0
    given: Any = node.args[0]
    stacked = node.target is aten.stack.default
    with graph.inserting_before(node):
        for part in given:
            start = at
            at += 1 if stacked else part.meta["val"].shape[dim]
            if start in lifted:
                whole = lifted[start]
                order = [*range(1, whole.meta["val"].ndim)]
                order.insert(dim, 0)
                parts.append(emit(graph, node, aten.permute.default, whole, order))
            elif any(first <= start < end for first, end in ends.items()):
                continue
            elif stacked:
                parts.append(emit(graph, node, aten.unsqueeze.default, part, dim))
            else:
                parts.append(part)
        alone = len(parts) == 1
        found = parts[0] if alone else emit(graph, node, aten.cat.default, parts, dim)
        if found.meta["val"].is_contiguous():
            return found
        return emit(graph, node, aten.clone.default, found, memory_format=torch.contiguous_format)


def _read_later(graph: fx.Graph, whole: fx.Node, values: Family) -> None:
    """Whoever reads a value behind its whole reads the whole: only that need be saved."""
    for index, value in enumerate(values):
        with graph.inserting_after(whole):
            view = emit(graph, value, aten.select.int, whole, 0, index)
        if view.meta["val"].stride() == value.meta["val"].stride():
            _redirect(graph, value, whole, view)
        if not view.users:
            graph.erase_node(view)


def _redirect(graph: fx.Graph, value: fx.Node, behind: fx.Node, view: fx.Node) -> None:
    for user in [*value.users]:
        if behind < user and user.op != "output":
            user.replace_input_with(value, view)
        elif is_view(user) and tensor_of(user) is not None and user < behind:
            with graph.inserting_after(view):
                again = graph.node_copy(user, lambda each: view if each is value else each)
            _redirect(graph, user, behind, again)
            if not again.users:
                graph.erase_node(again)
