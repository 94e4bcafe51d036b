"""Activation balancing of a model's stages on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import autosplit
from autosplit.pipeline import RunOptions
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.memory.balance import balance
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.planner.plan import Plan
from examples.families import FAMILIES, Family

from ..paper.settings import SIZES
from .balance import least, row_of
from .limit import measured_costs
from .settings import Settings
from .standin import Found

RANKS = (2, 4)
_LAYERS = {"layers": 4}  # one for each of four ranks


def measure_all(settings: Settings) -> Iterator[dict[str, Any]]:
    """1F1B as it is, with the paper's bound where that asks for anything, and with the least."""
    family = settings.families[0]
    for ranks in RANKS:
        args = (family, settings.size, ranks, settings.steps)
        found = launch(_on_rank, ranks, args, timeout=1200.0)[0]
        for each in found:
            if each.losses != found[0].losses:
                raise AssertionError(f"{family}, {each.name}: other losses than without")
            yield row_of(f"{family}, N={ranks}, {each.name}", each, found[0])


def _on_rank(family: str, size: str, ranks: int, steps: int) -> list[Found]:
    torch.set_num_threads(1)
    subject = FAMILIES[family](**{**SIZES[size][family], **_LAYERS})
    plan = autosplit.partition(
        subject.build(),
        subject.example(),
        cut_at=subject.cut_by_hand(ranks),
        microbatches=2 * ranks,
        costs="estimate",
    )
    plain = build("1f1b", ranks, 2 * ranks, split_backward=False)
    first, costs = _run("plain", plan, subject, plain, steps)
    ways = {"the paper's bound": balance(plain), "the least bound": least(plain, costs)}
    found = [
        _run(name, plan, subject, schedule, steps)[0]
        for name, schedule in ways.items()
        if schedule.ranks != plain.ranks
    ]
    return [first, *found]


def _run(
    name: str, plan: Plan, subject: Family, schedule: Schedule, steps: int
) -> tuple[Found, Costs]:
    """A few steps of a schedule, and what its stages take."""
    batch = subject.batch_fn(0, schedule.microbatches * subject.microbatch_size)
    count = schedule.stages
    with PipelineTrainer(
        plan,
        subject.loss_fn,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        microbatches=schedule.microbatches,
        schedule=schedule,
        run_options=RunOptions(timeout=300.0, record=True),
    ) as trainer:
        losses = trainer.step(batch).tolist()
        timelines = []
        for _ in range(max(3, steps)):
            trainer.step(batch)
            timelines.append(trainer.timeline())
        trainer.record = "memory"
        trainer.step(batch)
        memory = trainer.memory()
        pairs = [(rank, count - 1 - rank) for rank in range(count // 2)]
        costs = measured_costs(trainer, [each.spans for each in timelines], pairs)
    given = [bands[0].held["batch"] for bands in memory.bands]
    peaks = [peak - held for peak, held in zip(memory.peak_activations, given, strict=True)]
    predicted = [(peak or held) - held for peak, held in zip(memory.predicted, given, strict=True)]
    seconds = [each.makespan for each in timelines]
    return Found(name, tuple(peaks), tuple(predicted), seconds, losses), costs
