"""Custom autograd Functions under schedules that split the backward."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from .. import gradients
from ..case import Case, SymptomError, Thread
from ..gradients import mean_square
from ..meters import Products
from ..schedules import MakeStage, Pipeline, chunks, split_stage

_MICROBATCHES = 4
_KIND = "ScheduleInterleavedZeroBubble"


class _Product(torch.autograd.Function):
    """A matrix product that computes only what it is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = grad @ weight.t() if ctx.needs_input_grad[0] else None
        return dx, x.t() @ grad if ctx.needs_input_grad[1] else None


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = _Product.apply
        output: Tensor = apply(x, self.weight).tanh()
        return output


def _stages() -> tuple[list[nn.Module], Tensor, Tensor]:
    torch.manual_seed(0)
    stages: list[nn.Module] = [_Layer() for _ in range(4)]
    return stages, torch.randn(8, 8), torch.randn(8, 8)


def _gradients(make: MakeStage) -> str:
    stages, x, y = _stages()
    expected = gradients.plain(stages, chunks(_MICROBATCHES, x, y), mean_square)
    pipeline = Pipeline.of(_KIND, stages, make, _MICROBATCHES)
    return gradients.check(pipeline.step(x, target=y), expected)


def _work(make: MakeStage) -> str:
    stages, x, y = _stages()
    pipeline = Pipeline.of(_KIND, stages, make, _MICROBATCHES)
    pipeline.step(x, target=y)  # which may build graphs
    with Products() as products:
        pipeline.step(x, target=y)
    first = 0 in pipeline.modules  # whose input needs no gradient
    needed = _MICROBATCHES * (5 if first else 6)
    if products.count > needed:
        raise SymptomError(
            f"{products.count} matrix products in a step of two stages that needs {needed}"
        )
    return f"{products.count} matrix products in a step of two stages that needs {needed}"


CASES = [
    Case(
        "custom-function-run-twice",
        (Thread("pytorch/pytorch", 174017),),
        "a Function computes every gradient in I and again in W: it is not told what is asked for",
        functools.partial(_work, PipelineStage),
        functools.partial(_work, split_stage),
        seen="matrix products in a step",
    ),
    Case(
        "custom-function-weight-gradient",
        (Thread("pytorch/pytorch", 166577),),
        "W raises where a stage has a Function with a weight",
        functools.partial(_gradients, PipelineStage),
        functools.partial(_gradients, split_stage),
        seen="_input_metadata",
        fixed=(2, 13),
    ),
]
