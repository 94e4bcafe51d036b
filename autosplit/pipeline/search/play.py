"""Plays an order through in time, as ``simulate`` does, on numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .problem import INPUT, Problem, Rows

_TOLERANCE = 1e-9  # seconds; a shorter wait is what rounding leaves


class Play(NamedTuple):
    """How an order ran.

    Attributes:
        makespan: when the last action ended.
        starts: per action, when it began; -1 for what is not in the rows.
        causes: per action, the parcel that it waited for; -1 if its rank was busy until then.
        last: the rank that ended last.
    """

    makespan: float
    starts: list[float]
    causes: list[int]
    last: int


def play(problem: Problem, rows: Rows) -> Play | None:
    """Times are those of ``simulate``. None if the rows deadlock.

    Each row must hold F before I before W of a microbatch, or F before B.
    """
    needs, makes = problem.needs, problem.makes
    seconds = problem.placed_seconds
    starts, causes = [-1.0] * len(seconds), [-1] * len(seconds)
    ready = [-1.0] * len(problem.makers)
    waiting = [-1] * len(ready)
    links: dict[tuple[int, int], float] = {}
    early = [_Weights(problem, row, starts) for row in rows] if problem.costs.early_weights else []
    places, clocks = [0] * len(rows), [0.0] * len(rows)
    movable = list(range(len(rows)))
    left = sum(map(len, rows))
    while movable:
        rank = movable.pop()
        row, place, now = rows[rank], places[rank], clocks[rank]
        for action in row[place:] if place else row:
            start, cause = now, -1
            for parcel in needs[action]:
                arrival = ready[parcel]
                if arrival < 0.0:
                    waiting[parcel] = rank
                    break
                if arrival > start:
                    if arrival > start + _TOLERANCE:
                        cause = parcel
                    start = arrival
            else:
                if early:
                    filled = early[rank].fill(action, now, start)
                    if filled > start:
                        start, cause = filled, -1
                if starts[action] < 0.0:  # else a W that began in a wait
                    starts[action], causes[action] = start, cause
                now = start + seconds[action]
                place += 1
                left -= 1
                for parcel, link, took, latency in makes[action]:
                    if link is None:
                        ready[parcel] = now
                    else:
                        free = links.get(link, 0.0)
                        links[link] = free = (free if free > now else now) + took
                        ready[parcel] = free + latency
                    if waiting[parcel] >= 0:
                        movable.append(waiting[parcel])
                        waiting[parcel] = -1
                continue
            break
        places[rank], clocks[rank] = place, now
    if left:
        return None
    makespan = max(clocks)
    return Play(makespan, starts, causes, clocks.index(makespan))


class _Weights:
    """The Ws of a rank that runs them in every wait, in their order; see ``waits``."""

    def __init__(self, problem: Problem, row: Sequence[int], starts: list[float]) -> None:
        self._problem = problem
        self._starts = starts
        self._slices = [
            (action, part)
            for action in row
            if problem.slices[action]
            for part in problem.slices[action]
        ]
        self._slices.reverse()

    def fill(self, action: int, now: float, until: float) -> float:
        """When ``action`` can start: behind what is left of it, if it is a W, or behind the slices
        that run while it waits.
        """
        slices = self._slices
        if self._problem.slices[action]:
            while slices and slices[-1][0] == action:
                now = self._run(now)
            return now
        while now < until and slices and self._can_run(slices[-1][0]):
            now = self._run(now)
        return now

    def _run(self, now: float) -> float:
        weight, seconds = self._slices.pop()
        if self._starts[weight] < 0.0:
            self._starts[weight] = now
        return now + seconds

    def _can_run(self, weight: int) -> bool:
        return self._starts[self._problem.part(weight, INPUT)] >= 0.0
