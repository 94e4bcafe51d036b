"""The time of steps with the recorder, with all its digests, and with audits, beside steps of the
same trainer without.

::

    round 1   recorder on, off   all digests on, off   audits on, off
    round 2   recorder off, on   all digests off, on   audits off, on

Two trainers without a recorder differ by more than a recorder costs, by where their weights lie.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from autosplit.pipeline import PipelineTrainer, Recorder, RunOptions

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


@contextlib.contextmanager
def _switched_off(trainer: PipelineTrainer) -> Iterator[None]:
    """Context in which steps run as those of a trainer without recorder and audits."""
    runner, patches = trainer._runner, contextlib.ExitStack()
    if runner.flight is not None:
        patches.enter_context(mock.patch.object(runner, "flight", None))
        patches.enter_context(mock.patch.object(trainer, "_around_step", contextlib.nullcontext))
    if runner.auditor is not None:
        audits: dict[str, Any] = {
            "arrange_audits": lambda executor, stages: executor.set_audits((), ()),
            "measure_step": lambda spans, schedule, stages: None,
        }
        patches.enter_context(mock.patch.multiple(runner.auditor, **audits))
    with patches:
        yield


def turns(width: int, rounds: int, split: bool) -> dict[str, Any]:
    """Seconds of a step without, the multiples of it with the recorder, with all its digests, and
    with audits, and the coverage of the audits.
    """
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(2, ROWS * MICROBATCHES, width, generator=generator)
    seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ways: dict[str, dict[str, Any]] = {
            "recorded": {"recorder": Recorder(folder)},
            "all digests": {"recorder": Recorder(folder, digests="all")},
            "audited": {"audit": True},
        }
        trainers = {
            way: stack.enter_context(_trainer(width, RunOptions(split_backward=split, **options)))
            for way, options in ways.items()
        }
        for number, (way, trainer) in itertools.product(range(4 + rounds), trainers.items()):
            for is_on in (True, False) if number % 2 else (False, True):
                with contextlib.nullcontext() if is_on else _switched_off(trainer):
                    dist.barrier()
                    start = perf_counter()
                    trainer.step((batch[0], batch[1]))
                    if number >= 4:
                        seconds[way, is_on].append(perf_counter() - start)
        auditor: Any = trainers["audited"].auditor
        actions = sum(map(len, trainers["audited"].schedule.ranks))
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    return {
        "without": medians["recorded", False],
        **{way: medians[way, True] / medians[way, False] for way in ways},
        "period": auditor.period,
        "covered": actions - len(auditor.never),
        "actions": actions,
    }


def measure(launched: Callable[..., Any], width: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for full and for split backwards, on two ranks."""
    for split in (False, True):
        row = launched(turns, 2, (width, rounds, split), timeout=600.0)[0]
        yield {"name": f"2 ranks, {'split' if split else 'full'} backwards", **row}
