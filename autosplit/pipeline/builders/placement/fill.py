"""Put each backward weight where its rank would otherwise wait.

Greedy list scheduling under assumed durations: a rank that cannot start its next F or I runs a W
instead. F and I keep the order they have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.event_loop import play
from autosplit.pipeline.simulation.list_scheduling import ListScheduler
from autosplit.pipeline.simulation.replay import rows_of
from autosplit.pipeline.simulation.step_graph import StepGraph

from .template import Row

StageTimes = tuple[float, float, float]
"""Assumed durations of one stage's F, I and W in any common unit."""

_PLACE = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 2,
}


class Filled(NamedTuple):
    """Rows with their Ws, also as the filler's numbers, and what a step of them takes under the
    times that they were made for.
    """

    rows: tuple[Row, ...]
    step: float
    numbers: list[list[int]]


class Filler:
    """Adds each rank's Ws to its order of F and I, in the order of the Is.

    Args:
        schedule: F and I per rank.
        budgets: per rank, how many pairs of a stage and a microbatch may be between F and W: where
            there is no room left for another F, a W goes before it.
    """

    def __init__(self, schedule: Schedule, budgets: Sequence[int]) -> None:
        self._schedule = schedule
        self._budgets = budgets
        self._rows = rows_of(schedule)
        placed = [(rank, action) for rank, row in enumerate(schedule.ranks) for action in row]
        self._weights: dict[int, int] = {}
        """Of every I, its W."""
        for number, (rank, action) in enumerate([*placed]):
            if action.kind is ActionKind.BACKWARD_INPUT:
                self._weights[number] = len(placed)
                weight = Action(action.stage, ActionKind.BACKWARD_WEIGHT, action.microbatch)
                placed.append((rank, weight))
        self._graph = StepGraph(schedule, placed)
        self._forward = [each.kind is ActionKind.FORWARD for each in self._graph.actions]

    def fill(self, times: Sequence[StageTimes], *, patience: float = 0.0) -> Filled:
        """The rows with their Ws.

        Args:
            times: per stage, the assumed durations.
            patience: rather wait for an F or I that can start within this fraction of a W.

        Raises:
            ScheduleError: the orders deadlock, or cannot keep within the budgets.
        """
        graph, seconds = self._graph, self._seconds(times)
        scheduler = ListScheduler(graph, seconds, len(self._rows))
        orders = [deque(row) for row in self._rows]
        pending: list[deque[int]] = [deque() for _ in self._rows]
        in_flight = [0] * len(self._rows)

        def choose(rank: int, now: float) -> int | None:
            """The next F or I if that can start, else the next W, else nothing."""
            start = math.inf
            if orders[rank]:
                action = orders[rank][0]
                forward = self._forward[action]
                if not forward or in_flight[rank] < self._budgets[rank]:
                    start = scheduler.ready(action)
                if start <= now:
                    in_flight[rank] += forward
                    if action in self._weights:
                        pending[rank].append(self._weights[action])
                    return orders[rank].popleft()
            if not pending[rank] or start - now < patience * seconds[pending[rank][0]]:
                return None
            in_flight[rank] -= 1
            return pending[rank].popleft()

        scheduler.run(choose)
        self._refuse_rest([graph.actions[order[0]] for order in orders if order])
        rows = tuple(tuple(graph.actions[n] for n in row) for row in scheduler.rows)
        step = self._step(scheduler.rows, scheduler.starts, scheduler.ends)
        return Filled(rows, step, scheduler.rows)

    def step(self, numbers: Sequence[Sequence[int]], times: Sequence[StageTimes]) -> float:
        """Seconds of a step of rows that were filled under other times."""
        seconds = self._seconds(times)
        starts = play(self._graph, numbers, seconds).starts
        ends = [starts[row[-1]] + seconds[row[-1]] if row else 0.0 for row in numbers]
        return self._step(numbers, starts, ends)

    def _seconds(self, times: Sequence[StageTimes]) -> list[float]:
        return [times[action.stage][_PLACE[action.kind]] for action in self._graph.actions]

    def _refuse_rest(self, stuck: Sequence[Action]) -> None:
        if stuck:
            raise ScheduleError(
                f"no place for the backward weights within {max(self._budgets)} microbatches in "
                f"flight: nothing can run while {', '.join(map(str, stuck))} wait"
            )

    def _step(
        self, rows: Sequence[Sequence[int]], begun: Sequence[float], ends: Sequence[float]
    ) -> float:
        """Seconds of a step as ``simulate`` has them: links cost nothing here, and no action starts
        later than it can.
        """
        starts = [begun[row[0]] if row else 0.0 for row in rows]
        if not self._schedule.crosses_step:
            starts = [min(starts)] * len(starts)
        return max(end - start for start, end in zip(starts, ends, strict=True))
