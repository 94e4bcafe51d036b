"""Fold consecutive transposes that cancel: ``t(t(x))`` is ``x``.

Autograd transposes the gradient of a transposed weight back, one call behind the other. Both are
views of the same elements at the same strides, so the value that was transposed first takes the
place of the second view, and nothing that is computed changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..graph import FORWARD_OUTPUT, SplitProgram, calls, outputs, tensor_of

aten = torch.ops.aten


def fold_transposes(program: SplitProgram) -> bool:
    """Replace pairs of transposes that cancel by the first one's operand; True if any was."""
    graph = program.joint.graph
    # What the user's forward returns stays a tensor of its own, as in eager.
    returned = {value for _, value in outputs(graph, *FORWARD_OUTPUT)}
    pairs: list[tuple[fx.Node, fx.Node]] = []
    for node in [*calls(graph)]:
        operand = node.args[0] if node.args else None
        if node in returned or not isinstance(operand, fx.Node):
            continue
        first, second = _permutation(operand), _permutation(node)
        if first and second and [first[dim] for dim in second] == sorted(first):
            node.replace_all_uses_with(operand.args[0])  # type: ignore[arg-type]
            pairs.append((operand, node))
    for operand, node in pairs:
        graph.erase_node(node)
        if not operand.users and operand.op == "call_function":
            graph.erase_node(operand)
    return bool(pairs)


def _permutation(node: fx.Node) -> Sequence[int] | None:
    """The dimensions of what a node transposes, in their new order; None for anything else."""
    value = tensor_of(node)
    if value is None:
        return None
    order = list(range(value.ndim))
    arguments: Any = node.args[1:]
    if node.target is aten.t.default:
        return order[::-1]
    if node.target is aten.transpose.int:
        if not order:  # of a scalar, dimensions 0 and -1 may be named, and there is none
            return order
        one, other = arguments
        order[one], order[other] = order[other], order[one]
        return order
    if node.target is aten.permute.default:
        return [order[dim] for dim in arguments[0]]
    return None
