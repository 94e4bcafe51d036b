"""Modules whose backward writes: sums of weight gradients, statistics, histories of scaling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_Function: Any = torch.autograd.Function


class _IntoSum(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.total.add_(g.t() @ x)
        return g @ weight, None, None


class _Scaled(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, history: Tensor) -> Tensor:
        ctx.history = history
        return x * (1 + history.max())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        scale = 1 + ctx.history.max()
        ctx.history.copy_(torch.roll(ctx.history, 1))
        ctx.history[0] = g.abs().max()
        return g * scale, None


class _Both(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, history: Tensor) -> Tensor:
        ctx.history = history
        history[0] = x.abs().max()
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        ctx.history[1] = g.abs().max()
        return g * 2, None


class _Descending(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        result = g @ ctx.weight
        with torch.no_grad():
            ctx.weight.sub_(0.01 * (g.t() @ x))
        return result, None


@torch.library.custom_op("autosplit_tests::add_product", mutates_args={"total"})
def add_product(g: Tensor, x: Tensor, total: Tensor) -> None:
    total.add_(g.t() @ x)


class _ByOperator(_IntoSum):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        add_product(g.contiguous(), x, ctx.total)
        return g @ weight, None, None


class Writer(nn.Module):
    """Two linear layers around something that writes in its backward."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("total", torch.zeros(8, 8))
        self.register_buffer("history", torch.zeros(3))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.after(torch.relu(self.inner(h)))

    def inner(self, h: Tensor) -> Tensor:
        raise NotImplementedError


class IntoSum(Writer):
    def inner(self, h: Tensor) -> Tensor:
        return _IntoSum.apply(h, self.weight, self.total)


class Twice(Writer):
    def inner(self, h: Tensor) -> Tensor:
        return _IntoSum.apply(_IntoSum.apply(h, self.weight, self.total), self.weight, self.total)


class Scaled(Writer):
    def inner(self, h: Tensor) -> Tensor:
        return _Scaled.apply(h, self.history)


class ByOperator(Writer):
    def inner(self, h: Tensor) -> Tensor:
        return _ByOperator.apply(h, self.weight, self.total)


class Both(Writer):
    def inner(self, h: Tensor) -> Tensor:
        return _Both.apply(h, self.history)


class Descending(Writer):
    def inner(self, h: Tensor) -> Tensor:
        return _Descending.apply(h, self.weight)


class OfAttribute(Writer):
    """The sum is an attribute of the parameter, as Megatron has it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.weight.main_grad = torch.zeros(8, 8)

    def inner(self, h: Tensor) -> Tensor:
        return _IntoSum.apply(h, self.weight, self.weight.main_grad)


WRITERS = (IntoSum, Twice, Scaled, ByOperator)
