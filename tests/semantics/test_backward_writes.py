"""Writes of a backward: as in plain autograd where autograd runs it; stages refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError
from tests.autograd.faces import Compiled
from tests.semantics.against_autograd import assert_alike, assert_equals_autograd

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated:DeprecationWarning"  # by Dynamo, in parts
    ),
    pytest.mark.filterwarnings("ignore:.*weight gradients:autosplit.errors.DeferralWarning"),
]
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
        result = g @ weight
        with torch.no_grad():
            ctx.total.add_(g.t() @ x)
        return result, None, None


class _Scaled(_Function):
    """A history of scales, which forward and backward read and write."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, history: Tensor) -> Tensor:
        ctx.history = history
        history[1] = x.abs().max()
        return x * (1 + history[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        scale = 1 + ctx.history[0]
        ctx.history[0] = g.abs().max()
        return g * scale, None


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

    def __init__(self, kind: str, breaks: bool = False) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("total", torch.zeros(8, 8))
        self.register_buffer("history", torch.zeros(2))
        self.kind, self.breaks = kind, breaks

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.after(torch.relu(KINDS[self.kind](self, h)))


KINDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sum": lambda m, h: _IntoSum.apply(h, m.weight, m.total),
    "history": lambda m, h: _Scaled.apply(h, m.history),
    "operator": lambda m, h: _ByOperator.apply(h, m.weight, m.total),
    "attribute": lambda m, h: _IntoSum.apply(h, m.weight, m.weight.main_grad),
    "parameter": lambda m, h: _IntoSum.apply(h, m.weight.detach(), m.weight),
}


def batches() -> list[tuple[Tensor]]:
    return [(torch.randn(6, 8),) for _ in range(3)]


@pytest.mark.parametrize("kind", ["sum", "history", "operator"])
@pytest.mark.parametrize("breaks", [False, True])
def test_split(kind: str, breaks: bool) -> None:
    split = assert_equals_autograd(Writer(kind, breaks), batches())
    assert breaks or "the backward writes into" in split.report()


@pytest.mark.parametrize("kind", KINDS)
def test_under_torch_compile(kind: str) -> None:
    """And a stage refuses it, as one graph does."""
    torch._dynamo.reset()
    inputs, model = batches(), Writer(kind)

    def drive(call: Any, model: Any) -> list[Tensor]:
        model.weight.main_grad = torch.zeros(8, 8)  # as Megatron has it
        for batch in inputs:
            call(*batch).square().sum().backward()
        return [model.weight, model.weight.main_grad]

    assert_alike(model, drive, face=Compiled)
    with pytest.raises(CaptureError, match=r"writes into '\w+' \(from |main_grad|parameter|leaf"):
        autosplit.Stage(model, inputs[0])
