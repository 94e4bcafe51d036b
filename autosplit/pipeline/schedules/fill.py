"""Put each backward weight where its stage would otherwise wait.

Greedy list scheduling: play the step through under assumed durations, and let a stage that cannot
start its next F or I run a W instead. F and I keep the order they have. An order that was played
through once in time cannot deadlock: every action came after all that it needs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autosplit.errors import ScheduleError
from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.dependency import needs_of

StageTimes = tuple[float, float, float]
"""Assumed durations of one stage's F, I and W in any common unit."""


@dataclass
class _Stage:
    """What one stage still has to run, and what it has run."""

    order: deque[Action]
    times: StageTimes
    pending: deque[Action] = field(default_factory=deque)
    in_flight: int = 0
    free_at: float = 0.0
    done: list[Action] = field(default_factory=list)

    def run(self, action: Action, now: float) -> None:
        """Take ``action`` from where it waits and occupy the stage with it."""
        forward, backward_input, backward_weight = self.times
        self.done.append(action)
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            self.pending.popleft()
            self.in_flight -= 1
            self.free_at = now + backward_weight
            return
        self.order.popleft()
        if action.kind is ActionKind.FORWARD:
            self.in_flight += 1
            self.free_at = now + forward
        else:
            weight = Action(action.stage, ActionKind.BACKWARD_WEIGHT, action.microbatch)
            self.pending.append(weight)
            self.free_at = now + backward_input


def fill(
    orders: Sequence[Sequence[Action]],
    limit: int,
    times: Sequence[StageTimes],
    *,
    patience: float = 0.0,
) -> tuple[tuple[Action, ...], ...]:
    """Add each stage's Ws to its order of F and I, oldest microbatch first, one stage a rank.

    Args:
        orders: per stage, its F and I.
        limit: on each stage, at most so many microbatches whose F has run and whose W has not;
            at the limit, a W goes before the next F.
        times: per stage, the assumed durations.
        patience: rather wait for an F or I that can start within this fraction of a W.

    Raises:
        ScheduleError: the orders deadlock, or cannot keep the limit.
    """
    stages = [_Stage(deque(order), times[stage]) for stage, order in enumerate(orders)]
    there: dict[Action, float] = {}  # when each result is there, known from its action's start on
    # A stage looks for work when it starts, ends an action, or gets a neighbour's result.
    looks = [(0.0, index) for index in range(len(stages))]
    while looks:
        now, index = heapq.heappop(looks)
        stage = stages[index]
        action = _choose(stage, limit, there, len(stages), now, patience)
        if action is None or stage.free_at > now:
            continue
        stage.run(action, now)
        there[action] = stage.free_at
        for other in range(max(index - 1, 0), min(index + 2, len(stages))):
            heapq.heappush(looks, (stage.free_at, other))
    stuck = [str(stage.order[0]) for stage in stages if stage.order]
    if stuck:
        raise ScheduleError(
            f"no place for the backward weights within {limit} microbatches in flight: nothing "
            f"can run while {', '.join(stuck)} wait"
        )
    return tuple(tuple(stage.done) for stage in stages)


def _choose(
    stage: _Stage,
    limit: int,
    there: dict[Action, float],
    stages: int,
    now: float,
    patience: float,
) -> Action | None:
    """What a free stage starts now: its next F or I if that can start, else a W, else nothing."""
    start: float | None = None
    if stage.order:
        action = stage.order[0]
        needs = needs_of(action, stages)
        full = action.kind is ActionKind.FORWARD and stage.in_flight >= limit
        if not full and all(need in there for need in needs):
            start = max((there[need] for need in needs), default=0.0)
            if start <= now:
                return action
    if not stage.pending or (start is not None and start - now < patience * stage.times[2]):
        return None
    return stage.pending[0]
