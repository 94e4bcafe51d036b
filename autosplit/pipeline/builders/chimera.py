"""Chimera: two copies of the stages, through which microbatches go in opposite directions."""

from __future__ import annotations

import heapq
from collections import deque

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.placement.slots import (
    Row,
    Skeleton,
    backward,
    forward,
    most_in_flight,
)
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.dependency import needs_of

_UNITS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2}


def chimera(ranks: int, microbatches: int) -> Skeleton:
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
    return Skeleton(
        tuple(rows),
        tuple(range(ranks)),
        budgets=(max(map(most_in_flight, rows)),) * ranks,
        mirror=tuple(reversed(range(ranks))),
    )


def _unit(ranks: int, first: int, count: int) -> tuple[Row, ...]:
    """The rows of ``count`` microbatches from ``first`` on, half of them each way."""
    ways = [range(first + odd, first + count, 2) for odd in (0, 1)]
    lanes = [[_lane(ranks, list(way), stage) for stage in range(ranks)] for way in ways]
    return _merged([[lanes[0][rank], lanes[1][ranks - 1 - rank]] for rank in range(ranks)])


def _lane(ranks: int, numbers: list[int], stage: int) -> deque[Action]:
    """What ``stage`` of one copy runs, in the order of 1F1B."""
    ahead = min(ranks - 1 - stage, len(numbers))
    forwards = [forward(stage, number) for number in numbers]
    row = forwards[:ahead]
    for place, number in enumerate(numbers):
        row += [*forwards[place + ahead : place + ahead + 1], backward(stage, number)]
    return deque(row)


def _merged(lanes: list[list[deque[Action]]]) -> tuple[Row, ...]:
    """Each rank's two lanes as one row, by playing the step through with B = 2F."""
    ranks = len(lanes)
    rows: list[list[Action]] = [[] for _ in lanes]
    free, there = [0] * ranks, dict[Action, int]()
    looks = [(0, rank) for rank in range(ranks)]
    while looks:
        now, rank = heapq.heappop(looks)
        heads = [lane for lane in lanes[rank] if lane and _ready(lane[0], there, ranks) <= now]
        if free[rank] > now or not heads:
            continue
        lane = min(heads, key=lambda each: _urgency(each[0], len(each)))
        action = lane.popleft()
        rows[rank].append(action)
        free[rank] = there[action] = now + _UNITS[action.kind]
        for other in range(ranks):
            heapq.heappush(looks, (free[rank], other))
    return tuple(map(tuple, rows))


def _ready(action: Action, there: dict[Action, int], stages: int) -> float:
    """When all that ``action`` needs is there, as far as is known."""
    needs = (there.get(_whole(need), float("inf")) for need in needs_of(action, stages))
    return max(needs, default=0)


def _whole(result: Action) -> Action:
    """The action that makes a result before its backward is split."""
    if result.kind is ActionKind.FORWARD:
        return result
    return backward(result.stage, result.microbatch)


def _urgency(action: Action, left: int) -> tuple[bool, int]:
    """Backwards first, then the lane that has more left."""
    return action.kind is ActionKind.FORWARD, -left
