"""Operators on all steps of a loop at once.

A *whole* holds the values that the steps of a loop have for one thing, steps first. Here is how
an operator of one step is applied to wholes: views, pointwise arithmetic, batched matrix products,
in which steps are more of the batch, and padding that pads nothing. Results are the same to the
last bit, those of matrix products as far as their kernels do not care for the size of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ..graph import tensor_of

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Whole:
    """A node whose value has the steps along its first dimension."""

    node: fx.Node


Emit = Callable[..., fx.Node]
Lift = Callable[[Emit, fx.Node, list[Any]], fx.Node]
"""Takes an emitter, the operator as one step calls it, and that call's arguments, in which wholes
stand for what differs between the steps; returns the whole of the results.
"""


def lift_of(node: fx.Node) -> Lift | None:
    """How to apply a node's operator to all steps; None where it cannot be."""
    if node.op != "call_function" or tensor_of(node) is None:
        return None
    if node.target in (aten.select_scatter.default, aten.select_backward.default):
        return _LIFTS[node.target] if _pads_nothing(node) else None
    if any(isinstance(value, fx.Node) for value in node.kwargs.values()):
        return None
    return _LIFTS.get(node.target) or (_pointwise if is_exact(node) else None)


def arguments_of(node: fx.Node) -> tuple[Any, ...]:
    """What ``lift_of`` takes: the arguments, without zeros that nothing is left of."""
    if node.target in (aten.select_scatter.default, aten.select_backward.default):
        return _written(node), node.args[2]
    return node.args


def is_computing(node: fx.Node) -> bool:
    """Whether the operator does more than look at its argument in another way."""
    return node.target is aten.bmm.default or is_exact(node)


def is_exact(node: fx.Node) -> bool:
    """Whether each element of the result is made of those at its place, and rounded in one way
    only. Exponentials are not: a kernel has them for vectors and for single numbers, and which
    it takes depends on how a tensor lies in memory.
    """
    return node.target in _EXACT and not node.kwargs


def _rank(node: fx.Node) -> int:
    rank: int = node.meta["val"].ndim
    return rank


def _pointwise(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    def aligned(arg: Any) -> Any:
        """Broadcasting counts dimensions from the last."""
        if not isinstance(arg, Whole):
            return arg
        whole = arg.node
        while _rank(whole) <= _rank(node):
            whole = emit(aten.unsqueeze.default, whole, 1)
        return whole

    return emit(node.target, *map(aligned, args), **node.kwargs)


def _unsqueeze(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    whole, dim = args
    return emit(node.target, whole.node, dim % _rank(node) + 1)


def _along(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    """A view along one dimension of what it looks at."""
    whole, dim, *rest = [*args, 0][: max(len(args), 2)]
    return emit(node.target, whole.node, dim % (_rank(whole.node) - 1) + 1, *rest)


def _permute(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    whole, order = args
    return emit(node.target, whole.node, [0, *(dim % len(order) + 1 for dim in order)])


def _transpose(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    whole, one, other = args if len(args) == 3 else (args[0], 0, 1)
    if _rank(node) < 2:
        return emit(aten.alias.default, whole.node)
    one, other = (dim % _rank(node) + 1 for dim in (one, other))
    return emit(aten.transpose.int, whole.node, one, other)


def _expand(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    whole, _ = args
    found = whole.node
    while _rank(found) <= _rank(node):
        found = emit(aten.unsqueeze.default, found, 1)
    return emit(node.target, found, [found.meta["val"].shape[0], *node.meta["val"].shape])


def _view(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    found = args[0].node
    return shaped(emit, found, [found.meta["val"].shape[0], *node.meta["val"].shape])


def shaped(emit: Emit, node: fx.Node, sizes: list[int]) -> fx.Node:
    """A view of other sizes, of a copy where the memory does not allow it."""
    if list(node.meta["val"].shape) == sizes:
        return node
    try:
        return emit(aten.view.default, node, sizes)
    except (RuntimeError, ValueError):  # fake tensors raise the latter
        copy = emit(aten.clone.default, node, memory_format=torch.contiguous_format)
        return emit(aten.view.default, copy, sizes)


def _bmm(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    steps = next(arg.node.meta["val"].shape[0] for arg in args if isinstance(arg, Whole))

    def merged(arg: Any) -> fx.Node:
        whole = arg.node if isinstance(arg, Whole) else emit(aten.unsqueeze.default, arg, 0)
        batch, *matrix = whole.meta["val"].shape[1:]
        if not isinstance(arg, Whole):
            whole = emit(aten.expand.default, whole, [steps, batch, *matrix])
        return shaped(emit, whole, [steps * batch, *matrix])

    found = emit(node.target, *map(merged, args))
    return shaped(emit, found, [steps, *node.meta["val"].shape])


def _written(node: fx.Node) -> Any:
    """What padding writes into zeros."""
    return node.args[1 if node.target is aten.select_scatter.default else 0]


def _pads_nothing(node: fx.Node) -> bool:
    """Whether there are no zeros around what is written: along a dimension of size one."""
    dim = node.args[2]
    return isinstance(_written(node), fx.Node) and node.meta["val"].shape[dim] == 1


def _pad(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    whole, dim = args
    return emit(aten.unsqueeze.default, whole.node, dim % _rank(node) + 1)


_EXACT = frozenset(
    {
        aten.abs.default,
        aten.add.Scalar,
        aten.add.Tensor,
        aten.div.Tensor,
        aten.maximum.default,
        aten.minimum.default,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.neg.default,
        aten.relu.default,
        aten.sub.Tensor,
        aten.threshold_backward.default,
        aten.where.self,
        *(getattr(aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge")),
        *(getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    }
)

_LIFTS: Mapping[Any, Lift] = {
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _along,
    aten.select.int: _along,
    aten.slice.Tensor: _along,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.expand.default: _expand,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.bmm.default: _bmm,
    aten.select_scatter.default: _pad,
    aten.select_backward.default: _pad,
}
