"""The time of steps with the recorder, with all its digests, and with audits, beside steps without.
They run in turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import tempfile
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from autosplit.pipeline import PipelineTrainer, Recorder, RunOptions

MICROBATCHES, ROWS = 8, 64


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def keep_freed_memory() -> None:
    """Have the C library keep freed memory, as the allocators of GPUs do.

    By default it returns much of it to the system in some steps, and page faults then cost more
    than what is measured.
    """
    library = ctypes.CDLL(None)
    library.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    library.mallopt(_M_MMAP_MAX, 0)


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
    """Seconds of a step with neither, with the recorder, with all its digests, and with audits, by
    turns of one step each, and the coverage of the audits.
    """
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(2, ROWS * MICROBATCHES, width, generator=generator)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        recorders = Recorder(folder), Recorder(folder, digests="all")
        ways: list[dict[str, Any]] = [
            {},
            *({"recorder": recorder} for recorder in recorders),
            {"audit": True},
        ]
        trainers = [
            stack.enter_context(_trainer(width, RunOptions(split_backward=split, **way)))
            for way in ways
        ]
        seconds: list[list[float]] = [[] for _ in ways]
        for number in range(4 + rounds):
            for trainer, times in zip(trainers, seconds, strict=True):
                dist.barrier()
                start = perf_counter()
                trainer.step((batch[0], batch[1]))
                if number >= 4:
                    times.append(perf_counter() - start)
        auditor: Any = trainers[-1].auditor
        actions = sum(map(len, trainers[-1].schedule.ranks))
    without, recorded, all_digests, audited = map(statistics.median, seconds)
    return {
        "without": without,
        "recorded": recorded,
        "all digests": all_digests,
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
