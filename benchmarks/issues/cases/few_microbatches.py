"""Fewer microbatches than stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from .. import gradients
from ..case import ENGINE, Case, Thread
from ..gradients import mean_square
from ..schedules import Pipeline


def _setting() -> tuple[list[nn.Module], Tensor, Tensor]:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    return stages, torch.randn(8, 8), torch.randn(8, 8)


def _stock() -> str:
    stages, x, y = _setting()
    expected = gradients.plain(stages, [(x, y)], mean_square)
    pipeline = Pipeline.of("Schedule1F1B", stages, PipelineStage, 1)
    return gradients.check(pipeline.step(x, target=y), expected)


def _ours() -> str:
    from ..training import Trainer

    stages, x, y = _setting()
    expected = gradients.plain(stages, [(x, y)], mean_square)
    for schedule in ("1f1b", "gpipe", "zb-h1"):
        with Trainer(stages, 1, schedule=schedule) as trainer:
            gradients.check(trainer.step((x, y)), expected)
    return f"1f1b, gpipe and zb-h1 with one microbatch, {gradients.EQUAL}"


CASES = [
    Case(
        "fewer-microbatches-than-stages",
        (Thread("pytorch/torchtitan", 775),),
        "1F1B hangs with fewer microbatches than stages; newer versions refuse them",
        _stock,
        _ours,
        seen="microbatches|hangs",
        by=ENGINE,
    ),
]
