"""Parameters that are used more than once, in a stage or by several."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from .. import gradients
from ..case import ENGINE, Case, Thread
from ..gradients import mean_square
from ..schedules import MakeStage, Pipeline, chunks, split_stage

_MICROBATCHES = 4


class _Twice(nn.Module):
    """The reproducer of the report, as a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight @ self.weight


def _twice(make: MakeStage) -> str:
    torch.manual_seed(0)
    stages = [_Twice() for _ in range(4)]
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    expected = gradients.plain(stages, chunks(_MICROBATCHES, x, y), mean_square)
    pipeline = Pipeline.of("ScheduleInterleavedZeroBubble", stages, make, _MICROBATCHES)
    return gradients.check(pipeline.step(x, target=y), expected)


class _Head(nn.Module):
    """An output layer with the weight of the embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.tanh(), self.weight)


def _tied() -> tuple[list[nn.Module], Tensor, Tensor]:
    torch.manual_seed(0)
    embedding = nn.Embedding(16, 8)
    weight: Any = embedding.weight
    return [embedding, _Head(weight)], torch.randint(16, (8, 4)), torch.randn(8, 4, 16)


def _tied_stock() -> str:
    stages, ids, y = _tied()
    expected = gradients.plain(stages, chunks(_MICROBATCHES, ids, y), mean_square)
    pipeline = Pipeline.of("Schedule1F1B", stages, PipelineStage, _MICROBATCHES)
    return gradients.check(pipeline.step(ids, target=y), expected)


def _tied_ours() -> str:
    from ..training import Trainer

    stages, ids, y = _tied()
    expected = gradients.plain(stages, chunks(_MICROBATCHES, ids, y), mean_square)
    with Trainer(stages, _MICROBATCHES) as trainer:
        return gradients.check(trainer.step((ids, y)), expected)


CASES = [
    Case(
        "weight-used-twice-in-a-stage",
        (Thread("pytorch/pytorch", 180952),),
        "the gradient of a weight used at two places, one after the other, is counted twice",
        functools.partial(_twice, PipelineStage),
        functools.partial(_twice, split_stage),
        seen="the gradient of",
        fixed=(2, 13),
    ),
    Case(
        "weight-shared-by-two-stages",
        (Thread("pytorch/torchtitan", 4486), Thread("pytorch/torchtitan", 4488)),
        "an embedding that the last stage uses too gets half of its gradient on each rank",
        _tied_stock,
        _tied_ours,
        seen="the gradient of",
        by=ENGINE,
    ),
]
