"""Trainings with two copies of the stages that end badly, for spawned processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.schedule import Schedule
from tests.pipeline.workers import WIDTH, block, data, trainer


def _batch_norm(index: int) -> nn.Module:
    return nn.Sequential(block(index), nn.BatchNorm1d(WIDTH)) if index else block(index)


def _by_rank(index: int) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=dist.get_rank() == 0)


def _one_for_both() -> Callable[[int], nn.Module]:
    one = block(0)
    return lambda index: one


class Failing(nn.Module):
    """Stage 1 on rank 0, the second copy's, fails in its first microbatch; built it runs once."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = block(index)
        self._bad = index == 1 and dist.get_rank() == 0

    def forward(self, x: Tensor) -> Tensor:
        if self._bad and bool(x.any()):
            raise ValueError("bad weather")
        output: Tensor = self.inner(x)
        return output


SCENARIOS: dict[str, Callable[[], Any]] = {
    "written buffer": lambda: trainer(_batch_norm, schedule="chimera").step(data(8)),
    "built differently": lambda: trainer(_by_rank, schedule="chimera"),
    "one for both": lambda: trainer(_one_for_both(), schedule="chimera"),
    "two batches": lambda: trainer(schedule="chimera").step(data(8 + 4 * dist.get_rank())),
    "failing copy": lambda: trainer(Failing, schedule="chimera").step(data(8)),
    "one microbatch": lambda: trainer(schedule=lone_microbatch(), microbatches=1),
    "odd count": lambda: trainer(schedule="chimera", microbatches=3),
}


def lone_microbatch() -> Schedule:
    """Two copies, of which one runs nothing."""
    return Schedule(
        "lone",
        2,
        1,
        tuple(
            tuple(Action.parse(text) for text in row.split())
            for row in ("0F0 0I0 0W0", "1F0 1I0 1W0")
        ),
        (0, 1),
        True,
        mirror=(1, 0),
    )
