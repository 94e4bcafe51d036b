"""Values as slices of one tensor: selected from it, or the operands that it concatenates."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from ..analysis.symbolic_sizes import is_fixed
from ..graph import tensor_of

aten = torch.ops.aten


class SliceOf(NamedTuple):
    """A value that is ``tensor.select(dim, step)``."""

    tensor: fx.Node
    dim: int
    step: int


def selected_slice(node: fx.Node) -> SliceOf | None:
    """The slice that a ``select`` or an item of ``unbind`` reads; None for any other node."""
    args: Any = node.args
    if node.target is aten.select.int:
        tensor, dim, index = args
    elif node.target is operator.getitem and args[0].target is aten.unbind.int:
        unbound: Any = args[0].args
        tensor, dim, index = unbound[0], unbound[1] if len(unbound) > 1 else 0, args[1]
    else:
        return None
    value = tensor_of(tensor)
    if value is None or not is_fixed(value) or not isinstance(index, int):
        return None
    return SliceOf(tensor, dim % value.ndim, index % value.shape[dim])


def laid_out(node: fx.Node) -> tuple[int, list[fx.Node | None]] | None:
    """For a ``cat`` or ``stack``: its dimension, and the value at every index along it (None at
    indices of an operand with more than one). None for any other node.
    """
    value, args = tensor_of(node), (*node.args, 0)
    if node.target not in (aten.cat.default, aten.stack.default) or value is None:
        return None
    if not is_fixed(value) or node.kwargs:
        return None
    parts: Any = args[0]
    along: Any = args[1]
    dim = along % value.ndim
    if node.target is aten.stack.default:
        return dim, list(parts)
    found: list[fx.Node | None] = []
    for part in parts:
        if part.meta["val"].ndim != value.ndim:  # concatenating takes empty vectors too
            return None
        size = part.meta["val"].shape[dim]
        inner = part.args[0] if part.target is aten.unsqueeze.default else None
        alone = inner is not None and part.args[1] % value.ndim == dim
        found += [inner] if alone else [None] * size
    return dim, found


def is_available(tensor: fx.Node, at: fx.Node) -> bool:
    """Whether a tensor is computed before a node, or is a concatenation that can be moved there."""
    if tensor < at:
        return True
    return tensor is not at and laid_out(tensor) is not None and all(r < at for r in _read(tensor))


def _read(tensor: fx.Node) -> list[fx.Node]:
    """The operands of a concatenation, without the views that add its dimension."""
    parts: Any = tensor.args[0]
    return [p.args[0] if p.target is aten.unsqueeze.default else p for p in parts]


def move_before(tensor: fx.Node, at: fx.Node) -> None:
    """Move a reachable concatenation before a node."""
    if tensor < at:
        return
    parts: Any = tensor.args[0]
    for node in (*parts, tensor):
        if not node < at:
            at.prepend(node)
