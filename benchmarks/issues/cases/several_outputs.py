"""Operations with several outputs in the backward of a stage."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from .. import gradients
from ..case import Case, Thread
from ..gradients import mean_square
from ..schedules import MakeStage, Pipeline, chunks, split_stage

_MICROBATCHES = 4


class _GateAndUp(torch.autograd.Function):
    """Two products in one operation, as fused layers of gated units have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, gate, up)
        return x @ gate, x @ up

    @staticmethod
    def backward(ctx: Any, dgate: Tensor, dup: Tensor) -> tuple[Tensor, ...]:
        x, gate, up = ctx.saved_tensors
        return dgate @ gate.t() + dup @ up.t(), x.t() @ dgate, x.t() @ dup


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(8, 8) / 3)
        self.up = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = _GateAndUp.apply
        gate, up = apply(x, self.gate, self.up)
        output: Tensor = gate.sigmoid() * up
        return output


def _run(make: MakeStage) -> str:
    torch.manual_seed(0)
    stages = [_Gated() for _ in range(4)]
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    expected = gradients.plain(stages, chunks(_MICROBATCHES, x, y), mean_square)
    pipeline = Pipeline.of("ScheduleInterleavedZeroBubble", stages, make, _MICROBATCHES)
    return gradients.check(pipeline.step(x, target=y), expected)


CASES = [
    Case(
        "operation-with-two-outputs",
        (Thread("pytorch/pytorch", 170277),),
        "gradients of all outputs are summed and given to the first: wrong without a word",
        functools.partial(_run, PipelineStage),
        functools.partial(_run, split_stage),
        seen="the gradient of",
        fixed=(2, 13),
    ),
]
