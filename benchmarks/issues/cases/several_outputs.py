"""Operations with several outputs in the backward of a stage."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from .. import gradients
from ..case import Case, Thread
from ..gradients import mean_square
from ..schedules import MakeStage, Pipeline, chunks, split_stage

_MICROBATCHES = 4


class _Recurrent(nn.Module):
    """One step of an LSTM, whose outputs are one operation's and have the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output, (hidden, cell) = self.layer(x)
        found: Tensor = output + 2 * hidden.transpose(0, 1) * cell.transpose(0, 1)
        return found


def _run(make: MakeStage) -> str:
    torch.manual_seed(0)
    stages = [_Recurrent() for _ in range(4)]
    x, y = torch.randn(8, 1, 8), torch.randn(8, 1, 8)
    expected = gradients.plain(stages, chunks(_MICROBATCHES, x, y), mean_square)
    pipeline = Pipeline.of("ScheduleInterleavedZeroBubble", stages, make, _MICROBATCHES)
    return gradients.check(pipeline.step(x, target=y), expected)


CASES = [
    Case(
        "operation-with-several-outputs",
        (Thread("pytorch/pytorch", 170277),),
        "gradients of all outputs are summed and given to the first: wrong without a word",
        functools.partial(_run, PipelineStage),
        functools.partial(_run, split_stage),
        seen="the gradient of",
        fixed=(2, 13),
    ),
]
