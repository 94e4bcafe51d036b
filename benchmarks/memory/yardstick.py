"""The search within a limit of memory against an exact solver and single measures: counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.search.within_memory import MEASURES, search_within
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer

from ..results import Rows, Target, table, verdicts
from .settings import Settings

SINGLE = Target("step / best single measure", at_most=1.0)
SOLVER = Target("step / solver's best", at_most=1.02)
CASES = range(20)


def measure_all(settings: Settings) -> Iterator[dict[str, Any]]:
    """One row for each case of two or three stages, one a rank, in small whole numbers."""
    from ..optimum import optimum  # with OR-tools, which nothing else needs

    for seed in CASES:
        costs, microbatches, limit = _case(seed)
        placement = tuple(range(len(costs.times)))
        try:
            found = search_within(costs, microbatches, limit, placement=placement)
        except ScheduleError:
            continue
        single = []
        for measure in MEASURES:
            try:
                one = search_within(
                    costs, microbatches, limit, placement=placement, measures=(measure,)
                )
            except ScheduleError:
                continue
            single.append(one.timeline.step_time)
        step = found.timeline.step_time
        solved = optimum(
            costs,
            microbatches,
            limit,
            measures=tuple(MEASURES),
            known=step,
            seconds=settings.seconds,
        )
        yield {
            "name": str(seed),
            "stages": len(placement),
            "microbatches": microbatches,
            "limit": limit,
            "measures": ", ".join(effect.measure for effect in found.effects),
            "step": step,
            "single": min(single, default=None),
            "seconds": settings.seconds,
            "unlimited": found.unlimited,
            "solution": solved.step,
            "least": solved.bound,
        }


def _case(seed: int) -> tuple[Costs, int, float]:
    chance = random.Random(seed)
    stages = chance.choice((2, 2, 3))
    microbatches = chance.choice((3, 4) if stages == 3 else (4, 5))
    times = [
        (
            float(chance.choice((2, 3, 4))),
            float(chance.choice((2, 3, 4))),
            chance.choice((1.0, 2.0)),
        )
        for _ in range(stages)
    ]
    memory = [
        # Of one tensor: the solver's model moves microbatches whole.
        StageMemory(float(chance.choice((4, 6, 8))), float(chance.choice((3, 4))), 1.0)
        for _ in range(stages)
    ]
    links = Transfer(
        0.0, chance.choice((4.0, 8.0, 16.0)), host=Link(0.0, chance.choice((2.0, 4.0, 8.0)))
    )
    return Costs(times, memory, links), microbatches, chance.choice((10.0, 12.0, 14.0, 16.0))


def render(rows: Rows) -> str:
    """A line a case, and the worst of them."""
    lines = [
        [
            row["name"],
            str(row["stages"]),
            str(row["microbatches"]),
            f"{row['limit']:g}",
            row["measures"] or "order only",
            f"{row['step'] / row['unlimited']:.3f}x",
            "" if row["single"] is None else SINGLE.cell(row["step"] / row["single"]),
            f"{row['solution']:g}",
            f"{row['least']:g}",
            SOLVER.cell(row["step"] / row["solution"]),
        ]
        for row in rows
    ]
    headers = ["case", "N", "M", "limit", "measures", "of unlimited", SINGLE.title]
    headers += ["solver's best", "proven bound", SOLVER.title]
    judged = {
        SINGLE: {
            row["name"]: row["step"] / row["single"] for row in rows if row["single"] is not None
        },
        SOLVER: {row["name"]: row["step"] / row["solution"] for row in rows},
    }
    seconds = max((row["seconds"] for row in rows), default=0.0)
    return (
        f"{table(headers, lines)}\n\n{verdicts([*judged.items()])}\n\nJudged by the best solution "
        f"that the solver finds in {seconds:g} seconds: where its proven bound is less, a shorter "
        "step may exist. Its model lets a transfer begin at any moment, and counts what is held in "
        "time; a rank begins one between two actions, and what it holds is counted by the order of "
        "its row."
    )
