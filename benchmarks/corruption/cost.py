"""The time of steps with audits beside steps without, in one run and in turns."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from autosplit.pipeline import PipelineTrainer, RunOptions

MICROBATCHES, ROWS = 8, 64


def _block(width: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


def _trainer(width: int, options: RunOptions) -> PipelineTrainer:
    stages = dist.get_world_size()
    return PipelineTrainer(
        lambda _: nn.Sequential(_block(width), _block(width)),
        F.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        stages=stages,
        microbatches=MICROBATCHES,
        run_options=options,
    )


def turns(width: int, rounds: int, split: bool) -> dict[str, Any]:
    """Seconds of a step without and with audits, by turns of one step each, and the coverage."""
    batch = torch.randn(2, ROWS * MICROBATCHES, width)
    with contextlib.ExitStack() as stack:
        trainers = [
            stack.enter_context(_trainer(width, RunOptions(audit=audit, split_backward=split)))
            for audit in (False, True)
        ]
        seconds: list[list[float]] = [[], []]
        for number in range(4 + rounds):
            for trainer, times in zip(trainers, seconds, strict=True):
                dist.barrier()
                start = perf_counter()
                trainer.step((batch[0], batch[1]))
                if number >= 4:
                    times.append(perf_counter() - start)
        auditor: Any = trainers[1].auditor
        actions = sum(map(len, trainers[1].schedule.ranks))
    without, audited = map(statistics.median, seconds)
    return {
        "without": without,
        "audited": audited,
        "period": auditor.period,
        "covered": actions - len(auditor.never),
        "actions": actions,
    }


def measure(launched: Callable[..., Any], width: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for full and for split backwards, on two ranks."""
    for split in (False, True):
        row = launched(turns, 2, (width, rounds, split), timeout=600.0)[0]
        yield {"name": f"2 ranks, {'split' if split else 'full'} backwards", **row}
