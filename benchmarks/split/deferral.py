"""Deferral by hand: layers that queue their weight gradient, as Megatron-style code does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Queue = list[Callable[[], None]]


def defer_by_hand(module: nn.Module) -> tuple[nn.Module, Queue]:
    """A copy whose linear and two-dimensional convolution layers append to the queue, in
    backward, a call that computes their weight gradient. Bias and norm gradients stay in
    backward, and so do weights that a module uses without calling their layer.
    """
    queue: Queue = []
    return _replace(copy.deepcopy(module), queue), queue


def _replace(module: nn.Module, queue: Queue) -> nn.Module:
    for name, child in module.named_children():
        setattr(module, name, _replace(child, queue))
    if type(module) is nn.Linear:
        return _Linear(module, queue)
    if type(module) is nn.Conv2d:
        return _Conv(module, queue)
    return module


class _Linear(nn.Module):
    def __init__(self, layer: nn.Linear, queue: Queue) -> None:
        super().__init__()
        self.weight, self.bias, self.queue = layer.weight, layer.bias, queue

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _QueueLinear.apply(x, self.weight, self.bias, self.queue)  # type: ignore[no-untyped-call]
        return y


class _Conv(nn.Module):
    def __init__(self, layer: nn.Conv2d, queue: Queue) -> None:
        super().__init__()
        self.weight, self.queue = layer.weight, queue
        if layer.bias is not None or layer.padding_mode != "zeros":
            raise ValueError(f"written for convolutions without bias, padded by zeros: {layer}")
        # In the order of convolution_backward's schema.
        self.places = (layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _QueueConv.apply(x, self.weight, self.places, self.queue)  # type: ignore[no-untyped-call]
        return y


class _QueueLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, queue: Queue
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors

        def weight_gradient() -> None:
            rows = grad.reshape(-1, grad.shape[-1])
            _add(weight, rows.t() @ x.reshape(-1, x.shape[-1]))

        ctx.queue.append(weight_gradient)
        bias = grad.sum(tuple(range(grad.dim() - 1))) if ctx.needs_input_grad[2] else None
        return grad @ weight, None, bias, None


class _QueueConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, places: tuple[Any, ...], queue: Queue
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.places, ctx.queue = places, queue
        stride, padding, dilation, _, _, groups = places
        return F.conv2d(x, weight, None, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        places = ctx.places

        def weight_gradient() -> None:
            _add(weight, _convolution_backward(grad, x, weight, places, [False, True, False])[1])

        ctx.queue.append(weight_gradient)
        dx = _convolution_backward(grad, x, weight, places, [True, False, False])[0]
        return dx, None, None, None


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, places: tuple[Any, ...], mask: list[bool]
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        grad, x, weight, None, *places, mask
    )
    return found


def _add(weight: Tensor, grad: Tensor) -> None:
    if weight.grad is None:
        weight.grad = grad
    else:
        weight.grad += grad
