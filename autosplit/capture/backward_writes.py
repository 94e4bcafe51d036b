"""What a backward writes: AOTAutograd's trailing ``copy_`` as a result with a role."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from autosplit.passes import Kind, Role
from autosplit.passes.analysis.operators import writes_in_backward
from autosplit.passes.graph import placeholders, source_line

_TAG = "partitioner_tag"
_FORWARD = {"is_forward", "must_be_in_forward"}


def take_writes(
    graph: fx.Graph, role_of: Callable[[fx.Node], Role], error: type[Exception]
) -> list[tuple[Role, fx.Node]]:
    """Remove the writes of the backward, which then reads what it writes into as it is when it
    runs: between the forward and that, other microbatches may have written.

    Args:
        graph: a joint graph, as AOTAutograd traced it.
        role_of: the role of what is written into.
        error: for a write that no graph of ours can hold; names the user's line.

    Returns:
        Role and new value of each target.
    """
    found: list[tuple[Role, fx.Node]] = []
    for write in [node for node in graph.nodes if writes_in_backward(node)]:
        target, value = write.args[:2]
        line = source_line(value) or source_line(write)
        written = isinstance(target, fx.Node) and target.op == "placeholder"
        if not written or write.target is not torch.ops.aten.copy_.default:
            raise error(f"the backward writes by {write.target} (from {line})")
        role = Role(Kind.WRITE, role_of(target).name)
        if role in dict(found):
            raise error(f"the backward writes into {role.name!r} under two names (from {line})")
        if role_of(target).kind is Kind.PARAMETER:
            raise error(
                f"the backward writes into parameter {role.name!r} in place (from {line}); make it "
                "a buffer"
            )
        if any(node.meta.get(_TAG) == "must_be_in_forward" for node in target.users):
            raise written_twice(role.name, value, error)
        graph.erase_node(write)
        with graph.inserting_after(placeholders(graph)[-1]):
            now = graph.placeholder(f"{target.name}_now")
        now.meta = {**target.meta, "role": Role(Kind.TARGET, role.name)}
        later = [user for user in target.users if is_backward(user)]
        for user in later:
            user.replace_input_with(target, now)
        found.append((role, now if value is target else value))
    return found


def written_twice(name: str, value: fx.Node, error: type[Exception]) -> Exception:
    """The error for what both the forward and the backward write into."""
    return error(
        f"{name} is written in the forward and again in the backward (from {source_line(value)}), "
        "of which a graph knows only the last value; give the backward a buffer of its own"
    )


def is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get(_TAG) not in _FORWARD
