"""Writes of a custom autograd function's backward into state: sums of gradients, statistics.

    trace           copy_(total, add(total, g.t() @ x)) for a sum; copy_(state, new) for other state
    split graphs    W returns the new value of a sum; I returns the new values of other state

A sum is state that nothing reads except additions to it. The time of an addition changes no other
value, so W does it. I reads all other state and writes it directly afterwards. That state has the
same values as under plain autograd if forwards and backwards run in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autosplit.errors import CaptureError
from autosplit.passes import Kind, Role
from autosplit.passes.analysis.operators import READ, is_sum
from autosplit.passes.graph import inputs, is_like, outputs, placeholders, source_line
from autosplit.torch_internals.operators import register_fake

_LIBRARY = torch.library.Library(READ, "FRAGMENT")
_LIBRARY.define("state(Tensor state) -> Tensor")
_LIBRARY.impl("state", Tensor.clone, "CompositeExplicitAutograd")
register_fake(_LIBRARY, "state", torch.empty_like)
_OPERATOR: Any = getattr(torch.ops, READ).state.default


def label_writes(
    graph: fx.Graph, writes: Sequence[tuple[Role, Any]], backward: Collection[fx.Node]
) -> None:
    """Make the new value of each tensor that the backward writes an output of the joint graph.

    Args:
        graph: a joint graph; changed in place.
        writes: role and new value of each written tensor.
        backward: the nodes of the backward.

    Raises:
        CaptureError: the backward writes into something other than a buffer.
    """
    for role, value in writes:
        if role.kind is not Kind.BUFFER:
            raise refused_write(role, value)
        state = inputs(graph).get(role)
        updates = [v for r, v in outputs(graph, Kind.UPDATE) if r.name == role.name]
        seen = [node for node in (state, *updates) if node is not None]
        readers = {user for node in seen for user in node.users}
        readers_in_backward = [user for user in readers if user in backward]
        is_sum = readers.issubset(backward) and not updates and _is_sum(value, state)
        with graph.inserting_after(placeholders(graph)[-1]):
            written = current = graph.placeholder(f"{value.name}_into")
        written.target = written.name
        written.meta = {"val": value.meta["val"], "role": Role(Kind.WRITTEN, role.name)}
        if not is_sum:
            with graph.inserting_after(written):
                current = graph.call_function(_OPERATOR, (written,))
            current.meta = {"val": value.meta["val"]}
        for reader in readers_in_backward:
            for node in seen:
                reader.replace_input_with(node, current)
        kind = Kind.BACKWARD_SUM if is_sum else Kind.BACKWARD_UPDATE
        output = graph.output_node()
        output.args = ([*output.args[0], value],)  # type: ignore[misc]
        output.meta["roles"] = (*output.meta["roles"], Role(kind, role.name))
        if state is not None and not state.users:
            graph.erase_node(state)


def _is_sum(value: fx.Node, state: fx.Node | None) -> bool:
    """Whether a value is state plus other values, and nothing else reads the state."""
    node: Any = value
    while isinstance(node, fx.Node) and node is not state:
        if len(node.users) > (node is not value) or not is_like(node, value):
            return False
        node = _summed(node)
    return node is not None and node is state and len(state.users) == 1


def _summed(node: fx.Node) -> Any:
    """The tensor to which a node adds; None for a node that does not add."""
    if is_sum(node):
        return node.args[0]
    call: Any = node.args[0] if node.target is operator.getitem else None
    if isinstance(call, fx.Node) and call.target is _MUTATING and len(call.users) == 1:
        bases: Any = call.kwargs["_all_bases"]
        return bases[0] if len(bases) == 1 else None
    return None


_MUTATING: Any = torch.ops.higher_order.auto_functionalized_v2


def forward_value(value: Any, backward: Collection[fx.Node]) -> Any:
    """The value that the forward leaves in a tensor into which the backward then writes ``value``.
    None if the forward's value is unknown.
    """
    node = value
    while isinstance(node, fx.Node) and node in backward:
        node = node.args[0] if node.args else None
    return node if isinstance(node, fx.Node) and is_like(node, value) else None


def refused_write(role: Role, value: fx.Node) -> CaptureError:
    """The error for a backward that writes into a parameter or an input."""
    return CaptureError(
        f"the backward writes into {role.kind.value} {role.name!r} (from {source_line(value)}); "
        "a graph can write into buffers and into attributes of parameters (weight.main_grad). "
        "Make it a buffer, or write it in the training loop. A model that is split without "
        "fullgraph=True and not in stages runs such a function by ordinary autograd"
    )
