"""Pipelines whose stages are replicated by DistributedDataParallel."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from .. import gradients
from ..case import Case, SymptomError, Thread
from ..gradients import mean_square
from ..schedules import MakeStage, Pipeline, chunks, split_stage

_MICROBATCHES = 4


def _run(make: MakeStage) -> str:
    """A pipeline of one rank and two stages, twice: each rank has other samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    x, y = torch.randn(ranks, 8, 8), torch.randn(ranks, 8, 8)
    parts = [part for a, b in zip(x, y, strict=True) for part in chunks(_MICROBATCHES, a, b)]
    expected = gradients.plain(stages, parts, mean_square)
    replicas = [DistributedDataParallel(stage) for stage in stages]
    pipeline = Pipeline.of(
        "ScheduleInterleavedZeroBubble", replicas, make, _MICROBATCHES, group=alone
    )
    pipeline.step(x[rank], target=y[rank])
    gradients.check(gradients.of(dict(enumerate(stages))), expected)
    return f"reduced over both replicas, {gradients.EQUAL}"


def _hooks(make: MakeStage) -> str:
    """What DistributedDataParallel builds on, as do optimizers that step inside the backward."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    pipeline = Pipeline.of("ScheduleInterleavedZeroBubble", stages, make, _MICROBATCHES)
    fired = dict.fromkeys(pipeline.modules, 0)
    for at, module in pipeline.modules.items():

        def count(_: torch.Tensor, at: int = at) -> None:
            fired[at] += 1

        next(module.parameters()).register_post_accumulate_grad_hook(count)
    pipeline.step(torch.randn(8, 8), target=torch.randn(8, 8))
    times = list(fired.values())
    said = f"a parameter's hook fires {times} times in this rank's stages, for 4 microbatches"
    if set(times) != {_MICROBATCHES}:
        raise SymptomError(said)
    return said


CASES = [
    Case(
        "zero-bubble-with-parameter-hooks",
        (Thread("pytorch/pytorch", 144530),),
        "hooks on parameters never fire in W",
        functools.partial(_hooks, PipelineStage),
        functools.partial(_hooks, split_stage),
        seen="hook fires",
    ),
    Case(
        "zero-bubble-with-distributeddataparallel",
        (Thread("pytorch/pytorch", 144530),),
        "so DistributedDataParallel reduces nothing, and replicas drift apart",
        functools.partial(_run, PipelineStage),
        functools.partial(_run, split_stage),
        seen="the gradient of",
    ),
]
