"""Steps of a pipeline of two ranks whose trainers add exactly and by ``"auto"``, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.pipeline import PipelineTrainer, RunOptions, StageOptions, launch

from ..results import Rows, table
from .settings import Settings
from .weights import medians

RANKS, COUNT, TOKENS, LAYERS = 2, 8, 64, 3
SCHEDULES = {"1f1b, weights 2bp": ("1f1b", "2bp"), "zb-h1": ("zb-h1", None)}
WAYS = ("exact", "auto")
WARM_UP = 2  # steps


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each schedule; a step ends when the later rank is done."""
    for name in SCHEDULES:
        arguments = name, settings.width, settings.rounds
        ranks = launch(steps, RANKS, arguments, timeout=900.0, threads=1)
        seconds = {way: [*map(max, *(rank[way] for rank in ranks))] for way in WAYS}
        yield {"name": name, **medians(seconds, {"auto": "exact"})}


def steps(name: str, width: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of this rank's steps by each way."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    trainers = {way: _trainer(name, width, way) for way in WAYS}
    torch.manual_seed(0)  # the same batch on both ranks
    batch = torch.randn(COUNT, TOKENS, width), torch.randn(COUNT, TOKENS, width)
    for step in range(WARM_UP + rounds):
        for way, trainer in trainers.items():
            dist.barrier()
            start = time.perf_counter()
            trainer.step(batch)
            if step >= WARM_UP:
                seconds[way].append(time.perf_counter() - start)
    for trainer in trainers.values():
        trainer.close()
    return seconds


class Block(nn.Module):
    """A residual block of two wide layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def _trainer(name: str, width: int, way: str) -> PipelineTrainer:
    schedule, weights = SCHEDULES[name]
    return PipelineTrainer(
        lambda index: nn.Sequential(*[Block(width) for _ in range(LAYERS)]),
        lambda output, target: (output - target).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        stages=RANKS,
        microbatches=COUNT,
        schedule=schedule,
        stage_options=StageOptions(accumulation=way),
        run_options=RunOptions(weights=weights, timeout=120.0),
    )


def render(rows: Rows) -> str:
    """Milliseconds of a step, and the ratio of the pairs."""
    cells = [
        [
            row["name"],
            *(f"{1e3 * row['seconds'][way]:.1f}" for way in WAYS),
            f"{row['ratios']['auto']:.3f}",
        ]
        for row in rows
    ]
    return table(["step", *(f"{way}, ms" for way in WAYS), "auto / exact"], cells)
