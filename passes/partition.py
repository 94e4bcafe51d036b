"""Joint graph -> forward and backward, with the least saved between them.

Forward keeps everything the outputs need, and every random operator: a random number drawn
in the backward would neither match the forward's nor leave the generator alone. Operators
run once. Only views are redone in the backward, because they cost nothing, and what the user
put under ``torch.utils.checkpoint``; operators that only the backward needs (a cast of a
weight, say) move there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .aliasing import is_free, storage_root
from .errors import PassError
from .extract import extract
from .graph import (
    FORWARD_OUTPUT,
    GRADIENT,
    Kind,
    Program,
    Role,
    ancestors,
    calls,
    descendants,
    inputs,
    is_state,
    outputs,
    placeholders,
    role_of,
    source_line,
)
from .min_cut import min_cut
from .ops import checkpoint_region, is_effect, is_random

# Where AOTAutograd notes which half of the joint graph it was tracing.
_TAG = "partitioner_tag"


def partition(program: Program) -> bool:
    """Fill in ``forward`` and, where the joint graph has gradients, ``backward``.

    Raises:
        PassError: an output of the forward depends on an output's gradient, or the backward
            needs a forward value that is not a tensor.
    """
    graph = program.joint.graph
    results = outputs(graph, *FORWARD_OUTPUT)
    gradients = outputs(graph, *GRADIENT)
    before = ancestors([value for _, value in results if isinstance(value, fx.Node)])
    _refuse_draws_in_backward(graph)
    after = descendants(list(inputs(graph, Kind.TANGENT).values()))
    # Effects of the forward, assertions on values above all, stay in it though nobody reads them,
    # and so do random operators, which move the generator.
    unread = [node for node in calls(graph) if is_effect(node) or is_random(node)]
    before |= ancestors([node for node in unread if node not in after])
    if before & after:
        names = ", ".join(sorted(node.name for node in before & after)[:5])
        raise PassError(f"forward values depend on output gradients: {names}")
    saved = _fill_backward(program, before, after, gradients) if gradients else []
    program.forward = extract(
        program.joint,
        "forward",
        carried=[],
        compute=before | ancestors([node for _, node in saved]),
        returns=[*results, *saved],
    )
    return True


def _refuse_draws_in_backward(graph: fx.Graph) -> None:
    """A custom backward may draw random numbers that depend on no gradient. Drawn in forward
    instead, they and all that follow would be others than autograd's.
    """
    if not any(_TAG in node.meta for node in graph.nodes):
        return  # tracing had no backward to tell apart
    for node in calls(graph):
        if is_random(node) and node.meta.get(_TAG) != "is_forward":
            line = source_line(node)
            raise PassError(
                f"{node.target} draws random numbers in the backward"
                + (f" (from {line})" if line else "")
                + "; draw them in the forward and save them for it"
            )


def _fill_backward(
    program: Program,
    before: set[fx.Node],
    after: set[fx.Node],
    gradients: list[tuple[Role, Any]],
) -> list[tuple[Role, fx.Node]]:
    """Fill in ``backward``; returns what forward must save for it."""
    graph = program.joint.graph
    redone = {node for node in before if _is_inside_checkpoint(node, after)}
    early = {node for node in before - redone if not is_free(node)}
    early |= {node for node in placeholders(graph) if node not in after}
    early |= {node for node in calls(graph) if is_random(node) and node not in after}
    wanted = [value for _, value in gradients if isinstance(value, fx.Node)]
    boundary = min_cut(graph, early=early, late=after, wanted=wanted, redone=redone)
    overwritten = _overwritten(graph)
    saved: list[tuple[Role, fx.Node]] = []
    carried: list[tuple[Role, fx.Node]] = []
    for node in boundary.carried:
        if is_state(node) and node not in overwritten:
            carried.append((role_of(node), node))
            continue
        role = Role(Kind.SAVED, node.name)
        carried.append((role, node))
        kept = _copy(graph, node) if storage_root(node) in overwritten else node
        saved.append((role, kept))
    program.backward = extract(
        program.joint,
        "backward",
        carried=carried,
        compute=boundary.late,
        returns=gradients,
        on_demand=boundary.late - after,
    )
    return saved


def _is_inside_checkpoint(node: fx.Node, after: set[fx.Node]) -> bool:
    """Whether the user asked for recomputation and only the checkpointed region reads the
    value. What leaves the region is an ordinary value that may be saved.
    """
    region = checkpoint_region(node)
    readers = [user for user in node.users if user not in after]
    return region is not None and all(checkpoint_region(user) == region for user in readers)


def _overwritten(graph: fx.Graph) -> set[fx.Node]:
    """Buffers and inputs whose storage the forward overwrites when it is done."""
    names = {role.name for role, _ in outputs(graph, Kind.UPDATE)}
    state = inputs(graph, Kind.BUFFER, Kind.INPUT)
    return {node for role, node in state.items() if role.name in names}


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A copy to save in place of a value that the next microbatch's forward overwrites."""
    after = node if node.op != "placeholder" else placeholders(graph)[-1]
    with graph.inserting_after(after):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = {key: value for key, value in node.meta.items() if key != "role"}
    return copy
