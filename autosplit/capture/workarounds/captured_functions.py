"""Custom autograd functions in a graph of Dynamo's, made such that Dynamo can capture it again.

Dynamo (2.13) writes such a function as an operator of higher order with a graph for each
direction, and cannot trace that operator itself. A function that runs these graphs it can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_APPLY = torch.ops.higher_order.autograd_function_apply
# With others, such as inputs that are written into, the operator stays and is refused.
_KNOWN = {"non_differentiable_idx", "saved_for_backward_idx"}


def make_traceable(node: fx.Node) -> None:
    """Give a node that applies a custom autograd function a target that Dynamo can trace."""
    if node.target is _APPLY and node.kwargs.keys() <= _KNOWN:
        node.target = _apply


def _apply(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *args: Any,
    non_differentiable_idx: Any,
    saved_for_backward_idx: Any,
) -> Any:
    constant, saved = tuple(non_differentiable_idx), tuple(saved_for_backward_idx)
    return _Captured.apply(forward, backward, constant, saved, *args)  # type: ignore[no-untyped-call]


class _Captured(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        constant: tuple[int, ...],
        saved: tuple[int, ...],
        *args: Any,
    ) -> tuple[Tensor, ...]:
        outputs, kept = forward(*args)
        ctx.run = backward
        ctx.count, ctx.places = len(kept), saved
        ctx.others = tuple(each for at, each in enumerate(kept) if at not in saved)
        ctx.save_for_backward(*(kept[at] for at in saved))
        ctx.mark_non_differentiable(*(outputs[at] for at in constant))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved, others = list(ctx.saved_tensors), list(ctx.others)
        places = (at in ctx.places for at in range(ctx.count))
        kept = [(saved if is_saved else others).pop(0) for is_saved in places]
        return (None, None, None, None, *ctx.run(*grads, *kept))
