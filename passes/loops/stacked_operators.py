"""Batching rules: how an operator of one loop iteration is applied to stacked operands.

A stacked operand holds the values of all iterations along its first dimension, as ``torch.vmap``
would. There are rules for views, exact pointwise arithmetic, batched matrix products (iterations
become part of the batch), and padding along a dimension of size one. Results have the same bits,
those of matrix products as far as a kernel's result does not depend on the size of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ..analysis.operators import OPERATORS
from ..graph import tensor_of
from ..rewrites.emit import Emit

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Stacked:
    """A stacked operand: a node whose value has the iterations along its first dimension."""

    node: fx.Node


BatchingRule = Callable[[Emit, fx.Node, list[Any]], fx.Node]
"""Takes an emitter, the operator's call in one iteration, and the arguments of that call, of which
those that differ between iterations are ``Stacked``; returns the stacked results.
"""


def batching_rule(node: fx.Node) -> BatchingRule | None:
    """The rule for a node's operator; None where there is none."""
    if node.op != "call_function" or tensor_of(node) is None:
        return None
    if node.target in OPERATORS["pads"]:
        return _RULES[node.target] if _pads_nothing(node) else None
    if any(isinstance(value, fx.Node) for value in node.kwargs.values()):
        return None
    return _RULES.get(node.target) or (_pointwise if is_exact_elementwise(node) else None)


def batched_arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments that the rule takes: of padding only what is written and where, not the zeros
    around it, of which nothing is left.
    """
    if node.target in OPERATORS["pads"]:
        return _written(node), node.args[2]
    return node.args


def is_computation(node: fx.Node) -> bool:
    """Whether the operator computes, rather than being a view of its argument."""
    return node.target is aten.bmm.default or is_exact_elementwise(node)


def is_exact_elementwise(node: fx.Node) -> bool:
    """Whether the operator is elementwise and rounds the same way wherever an element lies."""
    return node.target in OPERATORS["elementwise"] and not node.kwargs


def _rank(node: fx.Node) -> int:
    rank: int = node.meta["val"].ndim
    return rank


def _pointwise(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    def aligned(arg: Any) -> Any:
        """Broadcasting counts dimensions from the last."""
        if not isinstance(arg, Stacked):
            return arg
        stack = arg.node
        while _rank(stack) <= _rank(node):
            stack = emit(aten.unsqueeze.default, stack, 1)
        return stack

    return emit(node.target, *map(aligned, args), **node.kwargs)


def _unsqueeze(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    stack, dim = args
    return emit(node.target, stack.node, dim % _rank(node) + 1)


def _along(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    """A view with a dimension among its arguments."""
    stack, dim, *rest = [*args, 0][: max(len(args), 2)]
    return emit(node.target, stack.node, dim % (_rank(stack.node) - 1) + 1, *rest)


def _permute(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    stack, order = args
    return emit(node.target, stack.node, [0, *(dim % len(order) + 1 for dim in order)])


def _transpose(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    stack, one, other = args if len(args) == 3 else (args[0], 0, 1)
    if _rank(node) < 2:
        return emit(aten.alias.default, stack.node)
    one, other = (dim % _rank(node) + 1 for dim in (one, other))
    return emit(aten.transpose.int, stack.node, one, other)


def _expand(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    stack, _ = args
    found = stack.node
    while _rank(found) <= _rank(node):
        found = emit(aten.unsqueeze.default, found, 1)
    return emit(node.target, found, [found.meta["val"].shape[0], *node.meta["val"].shape])


def _view(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    found = args[0].node
    return reshaped(emit, found, [found.meta["val"].shape[0], *node.meta["val"].shape])


def reshaped(emit: Emit, node: fx.Node, sizes: list[int]) -> fx.Node:
    """``Tensor.reshape``: a view, or the view of a contiguous copy."""
    if list(node.meta["val"].shape) == sizes:
        return node
    try:
        return emit(aten.view.default, node, sizes)
    except (RuntimeError, ValueError):  # fake tensors raise the latter
        copy = emit(aten.clone.default, node, memory_format=torch.contiguous_format)
        return emit(aten.view.default, copy, sizes)


def _bmm(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    steps = next(arg.node.meta["val"].shape[0] for arg in args if isinstance(arg, Stacked))

    def merged(arg: Any) -> fx.Node:
        stack = arg.node if isinstance(arg, Stacked) else emit(aten.unsqueeze.default, arg, 0)
        batch, *matrix = stack.meta["val"].shape[1:]
        if not isinstance(arg, Stacked):
            stack = emit(aten.expand.default, stack, [steps, batch, *matrix])
        return reshaped(emit, stack, [steps * batch, *matrix])

    found = emit(node.target, *map(merged, args))
    return reshaped(emit, found, [steps, *node.meta["val"].shape])


def _written(node: fx.Node) -> Any:
    """The operand that padding writes into zeros."""
    return node.args[1 if node.target is aten.select_scatter.default else 0]


def _pads_nothing(node: fx.Node) -> bool:
    """Whether the padded dimension has size one, so that there are no zeros around the operand."""
    dim = node.args[2]
    return isinstance(_written(node), fx.Node) and node.meta["val"].shape[dim] == 1


def _pad(emit: Emit, node: fx.Node, args: list[Any]) -> fx.Node:
    stack, dim = args
    return emit(aten.unsqueeze.default, stack.node, dim % _rank(node) + 1)


_RULES: Mapping[Any, BatchingRule] = {
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
