"""Put each backward weight where its rank would otherwise wait.

Greedy list scheduling: play the step through under assumed durations, and let a rank that cannot
start its next F or I run a W instead. F and I keep the order they have. An order that was played
through once in time cannot deadlock: every action came after all that it needs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.dependency import needs_of

from .slots import Row, Skeleton

StageTimes = tuple[float, float, float]
"""Assumed durations of one stage's F, I and W in any common unit."""

_PLACE = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 2,
}


class Filled(NamedTuple):
    """Rows with their Ws, and what a step of them takes under the times that they were made for."""

    rows: tuple[Row, ...]
    step: float


@dataclass
class _Rank:
    """What one rank still has to run, and what it has run."""

    order: deque[Action]
    budget: int
    pending: deque[Action] = field(default_factory=deque)
    in_flight: int = 0
    begun: float | None = None
    free_at: float = 0.0
    done: list[Action] = field(default_factory=list)

    def run(self, action: Action, now: float, end: float) -> None:
        """Take ``action`` from where it waits and occupy the rank with it until ``end``."""
        self.begun = now if self.begun is None else self.begun
        self.done.append(action)
        self.free_at = end
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            self.pending.popleft()
            self.in_flight -= 1
            return
        self.order.popleft()
        if action.kind is ActionKind.FORWARD:
            self.in_flight += 1
        else:
            self.pending.append(Action(action.stage, ActionKind.BACKWARD_WEIGHT, action.microbatch))


def fill(
    skeleton: Skeleton,
    times: Sequence[StageTimes],
    *,
    patience: float = 0.0,
) -> Filled:
    """Add each rank's Ws to its order of F and I, in the order of the Is.

    Args:
        skeleton: F and I per rank, and the budgets: where a rank has no room left for another F,
            a W goes before it.
        times: per stage, the assumed durations.
        patience: rather wait for an F or I that can start within this fraction of a W.

    Raises:
        ScheduleError: the orders deadlock, or cannot keep within the budgets.
    """
    ranks = [
        _Rank(deque(row), budget)
        for row, budget in zip(skeleton.rows, skeleton.budgets, strict=True)
    ]
    stages = len(skeleton.placement)
    there: dict[Action, float] = {}  # when each result is there, known from its action's start on
    # A rank looks for work when it starts, ends an action, or gets a neighbour's result.
    looks = [(0.0, index) for index in range(len(ranks))]
    while looks:
        now, index = heapq.heappop(looks)
        rank = ranks[index]
        if rank.free_at > now:
            continue
        action = _choose(rank, there, times, now, patience)
        if action is None:
            continue
        end = now + times[action.stage][_PLACE[action.kind]]
        rank.run(action, now, end)
        there[action] = end
        neighbours = range(max(action.stage - 1, 0), min(action.stage + 2, stages))
        for other in {index, *(skeleton.home(each, action.microbatch) for each in neighbours)}:
            heapq.heappush(looks, (end, other))
    stuck = [str(rank.order[0]) for rank in ranks if rank.order]
    if stuck:
        raise ScheduleError(
            f"no place for the backward weights within {max(skeleton.budgets)} microbatches in "
            f"flight: nothing can run while {', '.join(stuck)} wait"
        )
    # Links cost nothing here and no action starts later than it can: so this is the simulated step.
    starts = [rank.begun or 0.0 for rank in ranks]
    if not skeleton.crosses_step:
        starts = [min(starts)] * len(ranks)
    step = max(rank.free_at - start for rank, start in zip(ranks, starts, strict=True))
    return Filled(tuple(tuple(rank.done) for rank in ranks), step)


def _choose(
    rank: _Rank,
    there: dict[Action, float],
    times: Sequence[StageTimes],
    now: float,
    patience: float,
) -> Action | None:
    """What a free rank starts now: its next F or I if that can start, else a W, else nothing."""
    start: float | None = None
    if rank.order:
        action = rank.order[0]
        needs = needs_of(action, len(times))
        full = action.kind is ActionKind.FORWARD and rank.in_flight >= rank.budget
        if not full and all(need in there for need in needs):
            start = max((there[need] for need in needs), default=0.0)
            if start <= now:
                return action
    if not rank.pending:
        return None
    weight = rank.pending[0]
    if start is not None and start - now < patience * times[weight.stage][2]:
        return None
    return weight
