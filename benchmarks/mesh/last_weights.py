"""Reductions that simulated steps wait for, by the order of the Ws at the end of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from autosplit.pipeline.builders import placement
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.search.search import reduced_early
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.collectives import StageCollectives
from autosplit.pipeline.simulation.simulate import Costs

from ..results import Rows, table

RANKS, STAGES, MICROBATCHES = 4, 8, 8
SCHEDULES = ("interleaved", "zb-v", "v-half", "dualpipe-v")
REDUCTIONS = ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0), (1.0, 4.0), (4.0, 1.0))
MIXED, GROUPED, SEARCHED = "mixed", "stage by stage", "by costs"


def measure() -> Iterator[dict[str, Any]]:
    """A row for each schedule and length of reductions, which needs no clock."""
    for name in SCHEDULES:
        grouped = build(name, STAGES, MICROBATCHES, ranks=RANKS)
        with mock.patch.object(placement, "complete_by_stage", lambda row: row):
            mixed = build(name, STAGES, MICROBATCHES, ranks=RANKS)
        for lengths in REDUCTIONS:
            costs = _costs(lengths)
            tried = [grouped, *reduced_early([grouped], costs)]
            searched = min(tried, key=lambda schedule: costs.timeline(schedule).makespan)
            orders = {MIXED: mixed, GROUPED: grouped, SEARCHED: searched}
            exposed = {way: _exposed(schedule, costs) for way, schedule in orders.items()}
            first, second = lengths
            yield {"name": f"{name}, {first:g} and {second:g}", "exposed": exposed}


def _costs(lengths: tuple[float, float]) -> Costs:
    """Costs with F = I = W = 1. Stages of the first and of the second half of the model have
    reductions of two lengths, in two buckets.
    """
    halves = [lengths[stage >= STAGES // 2] for stage in range(STAGES)]
    return Costs(
        [(1.0, 1.0, 1.0)] * STAGES,
        [StageMemory(1.0, 1.0)] * STAGES,
        collectives=[StageCollectives(reduction=length, parts=2) for length in halves],
    )


def _exposed(schedule: Schedule, costs: Costs) -> float:
    step, free = costs.timeline(schedule), replace(costs, collectives=()).timeline(schedule)
    return step.makespan - free.makespan


def render(rows: Rows) -> str:
    """The time that a step waits for, by the order of its last Ws."""
    ways = (MIXED, GROUPED, SEARCHED)
    cells = [[row["name"], *(f"{row['exposed'][way]:.2f}" for way in ways)] for row in rows]
    return table(["schedule, reductions of the two halves", *ways], cells)
