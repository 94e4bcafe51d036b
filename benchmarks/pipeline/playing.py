"""What the simulator's core saves a search, beside the clock that list scheduling needs."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.search.problem import Problem, Rows
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.playing import ListScheduler, play
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer

from ..results import Rows as Found
from ..results import table

SIZES = ((4, 8), (8, 16), (16, 32))
TURNS = 7
PLAYS = 200


def measure_all(plays: int = PLAYS) -> Iterator[dict[str, Any]]:
    """ZB-H1's order, played both ways in turns: microseconds an action."""
    for stages, microbatches in SIZES:
        schedule = build("zb-h1", stages, microbatches)
        costs = Costs([(18.5, 18.1, 9.3)] * stages, [StageMemory(1.0, 1.0)] * stages, Transfer(0.5))
        problem = Problem(costs, schedule.placement, microbatches, (float("inf"),) * stages)
        rows = [[problem.number[action] for action in row] for row in schedule.ranks]
        ways: dict[str, Callable[[], float]] = {
            "core": functools.partial(_core, problem, rows),
            "clock": functools.partial(_clock, problem, rows),
        }
        if len({way() for way in ways.values()}) > 1:
            raise AssertionError("two ways to play, two steps")
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(TURNS):
            for name, way in ways.items():
                start = time.perf_counter()
                for _ in range(plays):
                    way()
                actions = plays * sum(map(len, rows))
                took[name].append(1e6 * (time.perf_counter() - start) / actions)
        yield {"name": f"N = {stages}, M = {microbatches}", **took}


def _core(problem: Problem, rows: Rows) -> float:
    return play(problem, rows, problem.seconds).makespan


def _clock(problem: Problem, rows: Rows) -> float:
    """The same order by list scheduling whose policy is to run each row as it is."""
    scheduler = ListScheduler(problem, problem.seconds, len(rows))
    places = [0] * len(rows)

    def choose(rank: int, now: float) -> int | None:
        row, place = rows[rank], places[rank]
        if place == len(row) or scheduler.ready(row[place]) > now:
            return None
        places[rank] += 1
        return row[place]

    scheduler.run(choose)
    return max(scheduler.ends)


def render(rows: Found) -> str:
    """Microseconds an action of each way, and their ratio."""
    cells = []
    for row in rows:
        core, clock = (statistics.median(row[way]) for way in ("core", "clock"))
        cells.append([row["name"], f"{core:.2f}", f"{clock:.2f}", f"{clock / core:.1f}"])
    return table(["ZB-H1", "core us", "with a clock us", "with a clock / core"], cells)
