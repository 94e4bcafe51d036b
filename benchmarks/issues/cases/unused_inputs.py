"""Inputs of a stage that need or get no gradient, or have a graph of their own."""

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


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(8, 8)
        self.side = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x).tanh(), self.side(x).tanh()


class _First(nn.Module):
    """Has no use for the second input, as a mixture of experts with no token for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, main: Tensor, side: Tensor) -> Tensor:
        output: Tensor = self.layer(main)
        return output


def _unused(make: MakeStage) -> str:
    torch.manual_seed(0)
    stages = [_Two(), _First()]
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    expected = gradients.plain(stages, chunks(_MICROBATCHES, x, y), mean_square)
    pipeline = Pipeline.of("Schedule1F1B", stages, make, _MICROBATCHES)
    return gradients.check(pipeline.step(x, target=y), expected)


def _graph(make: MakeStage) -> str:
    """The inputs of the pipeline come from a layer in front of it."""
    torch.manual_seed(0)
    front = nn.Linear(8, 8)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    wanted = gradients.plain([front, *stages], chunks(_MICROBATCHES, x, y), mean_square)
    expected = {f"{int(n[0]) - 1}{n[1:]}": g for n, g in wanted.items() if n[0] != "0"}
    pipeline = Pipeline.of("Schedule1F1B", stages, make, _MICROBATCHES)
    return gradients.check(pipeline.step(front(x).tanh() * 1, target=y), expected)


CASES = [
    Case(
        "inputs-that-get-no-gradient",
        (Thread("pytorch/pytorch", 152827), Thread("pytorch/pytorch", 153484)),
        "a stage with no use for one of its inputs raises when it is to send that one's gradient",
        functools.partial(_unused, PipelineStage),
        functools.partial(_unused, split_stage),
        seen="gradient",
        fixed=(2, 13),
    ),
]
