"""Which rank holds which stage."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from .. import gradients
from ..case import ENGINE, Case, Thread
from ..gradients import mean_square
from ..schedules import Pipeline, chunks

_MICROBATCHES = 4


def _setting() -> tuple[list[nn.Module], Tensor, Tensor]:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    return stages, torch.randn(8, 8), torch.randn(8, 8)


def _stock() -> str:
    stages, x, y = _setting()
    expected = gradients.plain(stages, chunks(_MICROBATCHES, x, y), mean_square)
    mine = range(dist.get_rank(), 4, 2)  # in loops, as for all other schedules
    kind = "ScheduleZBVZeroBubble"
    part = x.chunk(_MICROBATCHES)[0]
    make = functools.partial(PipelineStage, input_args=part, output_args=part)
    pipeline = Pipeline.of(kind, stages, make, _MICROBATCHES, mine=mine)
    return gradients.check(pipeline.step(x, target=y), expected)


def _ours() -> str:
    from ..training import Trainer

    stages, x, y = _setting()
    expected = gradients.plain(stages, chunks(_MICROBATCHES, x, y), mean_square)
    with Trainer(stages, _MICROBATCHES, schedule="zb-v") as trainer:
        gradients.check(trainer.step((x, y)), expected)
    return f"the schedule says which rank holds what, {gradients.EQUAL}"


CASES = [
    Case(
        "placement-of-zbv-stages",
        (Thread("pytorch/torchtitan", 774),),
        "ZBV with stages placed as for every other schedule ends in a KeyError",
        _stock,
        _ours,
        seen="KeyError",
        by=ENGINE,
    ),
]
