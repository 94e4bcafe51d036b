"""What one rank does in test_trainers.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import autosplit
from autosplit.torch_internals.version import TORCH

SCHEDULES: dict[str, tuple[int, bool]] = {
    # name -> stages a rank, whether the stage is told how to run W
    "ScheduleGPipe": (1, False),
    "Schedule1F1B": (1, False),
    "ScheduleInterleaved1F1B": (2, False),
    "ScheduleLoopedBFS": (2, False),
    "ScheduleInterleavedZeroBubble": (2, True),
    "ScheduleZBVZeroBubble": (2, True),
    "ScheduleDualPipeV": (2, True),
}
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
if TORCH < (2, 12):  # of any modules: Gloo is asked to send shapes from a rank to itself
    SCHEDULES = {name: how for name, how in SCHEDULES.items() if name not in V_SHAPED}
MICROBATCHES = 4


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def all_errors() -> dict[str, float]:
    return {name: error(name) for name in SCHEDULES}


def error(name: str) -> float:
    """Largest difference from one process's gradients, after two accumulated steps' last."""
    a_rank, told = SCHEDULES[name]
    rank, count = dist.get_rank(), 2 * a_rank
    torch.manual_seed(0)
    whole = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)]
    plain = copy.deepcopy(whole)
    mine = [rank + 2 * at for at in range(a_rank)]
    if name in V_SHAPED:
        mine = [rank, count - 1 - rank]
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    splits = {at: autosplit.split(whole[at]) for at in mine}
    stages = [_stage(splits[at], at, count, told) for at in mine]
    kind = getattr(schedules, name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, MICROBATCHES, loss_fn=mean_square)
    worst = 0.0
    for _ in range(2):
        for at in mine:
            splits[at].zero_grad()
        args: tuple[Tensor, ...] = (x,) if 0 in mine else ()
        schedule.step(*args, **({"target": y} if count - 1 in mine else {}))
        expected = _expected(plain, x, y)
        for at in mine:
            for parameter, grad in zip(splits[at].parameters(), expected[at], strict=True):
                worst = max(worst, (parameter.grad - grad).abs().max().item())
    return worst


def _stage(split: autosplit.SplitModule, at: int, count: int, told: bool) -> PipelineStage:
    options: dict[str, Any] = {"dw_builder": lambda: split.backward_weight} if told else {}
    return PipelineStage(split, at, count, torch.device("cpu"), **options)


def _expected(plain: list[nn.Sequential], x: Tensor, y: Tensor) -> list[list[Tensor]]:
    model = nn.Sequential(*plain)
    model.zero_grad()
    for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        (mean_square(model(a), b) / MICROBATCHES).backward()
    return [[p.grad for p in part.parameters() if p.grad is not None] for part in plain]
