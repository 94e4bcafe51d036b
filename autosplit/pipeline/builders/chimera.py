"""Chimera: two copies of the stages, through which microbatches go in opposite directions."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.placement.template import (
    Row,
    ScheduleTemplate,
    backward,
    forward,
    most_in_flight,
)
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.list_scheduling import ListScheduler
from autosplit.pipeline.simulation.step_graph import StepGraph

_UNITS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2}


def chimera(ranks: int, microbatches: int) -> ScheduleTemplate:
    """Rank r of P holds stage r of one copy and stage P-1-r of the other; each runs half of M.

    Source: Li and Hoefler, arXiv 2107.06925, figure 3. P microbatches are a unit: half of them go
    each way, in the order of 1F1B, and a rank runs what can start first, a backward before a
    forward. Units follow each other on every rank (the paper's direct concatenation).

    Bubble for like stages, full backwards of B = I + W >= F and M = kP: each rank idles k(P-2)B,
    against 1F1B's (P-1)(F+B). Split, for F = I = W: (P/2-1)F whatever k. Parameters are held twice.

    Activation memory for M >= P: with full backwards from P/2+1 microbatches on the first and the
    last rank to P on those in the middle; split, at most P on every rank.

    Raises:
        ScheduleError: an odd count.
    """
    if ranks % 2 or microbatches % 2:
        raise ScheduleError(
            "'chimera' needs an even number of ranks and of microbatches; got "
            f"{ranks} ranks and {microbatches} microbatches"
        )
    rows: list[Row] = [()] * ranks
    for first in range(0, microbatches, ranks):
        unit = _unit(ranks, first, min(ranks, microbatches - first))
        rows = [row + more for row, more in zip(rows, unit, strict=True)]
    return ScheduleTemplate(
        tuple(rows),
        tuple(range(ranks)),
        budgets=(max(map(most_in_flight, rows)),) * ranks,
        mirror=tuple(reversed(range(ranks))),
    )


def _unit(ranks: int, first: int, count: int) -> tuple[Row, ...]:
    """The rows of ``count`` microbatches from ``first`` on, half of them each way."""
    ways = [list(range(first + odd, first + count, 2)) for odd in (0, 1)]
    there, back = ([_lane(ranks, way, stage) for stage in range(ranks)] for way in ways)
    return _merged(list(zip(there, reversed(back), strict=True)))


def _lane(ranks: int, numbers: list[int], stage: int) -> Row:
    """What ``stage`` of one copy runs, in the order of 1F1B."""
    ahead = min(ranks - 1 - stage, len(numbers))
    forwards = [forward(stage, number) for number in numbers]
    row = forwards[:ahead]
    for place, number in enumerate(numbers):
        row += [*forwards[place + ahead : place + ahead + 1], backward(stage, number)]
    return tuple(row)


def _merged(lanes: Sequence[tuple[Row, Row]]) -> tuple[Row, ...]:
    """Each rank's two lanes as one row, by list scheduling with B = 2F.

    A rank runs what can start first: a backward before a forward, then the lane with more left.
    """
    ranks = range(len(lanes))
    rows = tuple(one + other for one, other in lanes)
    graph = StepGraph(Schedule("chimera", len(ranks), 1, rows, tuple(ranks), split_backward=False))
    scheduler = ListScheduler(graph, [_UNITS[each.kind] for each in graph.actions], len(ranks))
    numbers = itertools.count()
    left = [[deque(zip(lane, numbers, strict=False)) for lane in own] for own in lanes]

    def choose(rank: int, now: float) -> int | None:
        heads = [lane for lane in left[rank] if lane and scheduler.ready(lane[0][1]) <= now]
        if not heads:
            return None
        _, number = min(heads, key=_urgency).popleft()
        return number

    scheduler.run(choose)
    return tuple(tuple(graph.actions[number] for number in row) for row in scheduler.rows)


def _urgency(lane: deque[tuple[Action, int]]) -> tuple[bool, int]:
    """Backwards first, then the lane that has more left."""
    return lane[0][0].kind is ActionKind.FORWARD, -len(lane)
