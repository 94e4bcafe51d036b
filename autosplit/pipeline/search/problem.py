"""A pipeline as numbers, so that thousands of orders can be played through in a second."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.costs import Costs
from autosplit.pipeline.dependency import needs_of, result_of
from autosplit.pipeline.routes import target_of
from autosplit.pipeline.schedule import Schedule

KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
    ActionKind.BACKWARD,
)
FORWARD, INPUT, WEIGHT, FULL = KINDS

Rows = list[list[int]]
"""Per rank, the numbers of its actions in order."""


class Problem:
    """Every F, I, W and B of a step, numbered, with what it needs, takes and keeps.

    An order has either the B of a stage and a microbatch or its I and W.

    Args:
        costs: of every stage.
        placement: ``placement[stage]`` is the rank that holds the stage.
        microbatches: M.
        caps: per rank, the most it may keep at once.
    """

    def __init__(
        self,
        costs: Costs,
        placement: Sequence[int],
        microbatches: int,
        caps: Sequence[float],
    ) -> None:
        self.costs = costs
        self.placement = tuple(placement)
        self.microbatches = microbatches
        self.caps = tuple(caps)
        stages = len(placement)
        self.actions = [
            Action(stage, kind, microbatch)
            for stage in range(stages)
            for kind in KINDS
            for microbatch in range(microbatches)
        ]
        self.number = {action: number for number, action in enumerate(self.actions)}
        self.rank = [placement[action.stage] for action in self.actions]
        self.seconds = [costs.seconds(action) for action in self.actions]
        self.adds = [costs.memory[a.stage].before(a.kind) for a in self.actions]
        self.frees = [costs.memory[a.stage].after(a.kind) for a in self.actions]
        self.needs = [self._need(action, stages) for action in self.actions]
        self.result = [self.number[result_of(action)] for action in self.actions]
        self.whole = [self._is_better_whole(stage) for stage in range(stages)]
        self.target = [self._target(action, stages) for action in self.actions]
        self.sending = [
            0.0 if target < 0 else costs.transfer.occupies(result_of(action))
            for action, target in zip(self.actions, self.target, strict=True)
        ]

    def _need(self, action: Action, stages: int) -> int:
        """The result that comes from another stage, or -1."""
        others = (need for need in needs_of(action, stages) if need.stage != action.stage)
        return next((self.number[need] for need in others), -1)

    def _is_better_whole(self, stage: int) -> bool:
        """Whether a B of ``stage`` can be better than its I and W: shorter, or keeping less.

        Otherwise an I hands on its gradient earlier, and costs nothing more.
        """
        size, (_, inputs, weights) = self.costs.memory[stage], self.costs.times[stage]
        bounded = not math.isinf(self.caps[self.placement[stage]])
        shorter = self.costs.full is not None and self.costs.full[stage] < inputs + weights
        return shorter or (bounded and size.deferred > size.saved)

    def part(self, action: int, kind: ActionKind) -> int:
        """The number of the same stage's ``kind`` on the same microbatch."""
        what = self.actions[action]
        return self.number[Action(what.stage, kind, what.microbatch)]

    def _target(self, action: Action, stages: int) -> int:
        """The other rank that gets the result, or -1."""
        stage = target_of(result_of(action), stages)
        if stage is None or self.placement[stage] == self.placement[action.stage]:
            return -1
        return self.placement[stage]

    def play(self, rows: Rows) -> tuple[float, list[float]] | None:
        """When the last action ends and when each starts, or None if the rows deadlock.

        Times are those of ``simulate``; -1 for what is not in the rows. Each row must hold F before
        I before W of a microbatch, or F before B.
        """
        latency, needs, seconds = self.costs.transfer.latency, self.needs, self.seconds
        result = self.result
        starts = [-1.0] * len(self.actions)
        ready = [-1.0] * len(self.actions)
        links: dict[tuple[int, int], float] = {}
        waiting: dict[int, int] = {}
        places, clocks = [0] * len(rows), [0.0] * len(rows)
        movable = list(range(len(rows)))
        left = sum(map(len, rows))
        while movable:
            rank = movable.pop()
            row, place, now = rows[rank], places[rank], clocks[rank]
            for action in row[place:]:
                need = needs[action]
                if need >= 0:
                    if ready[need] < 0.0:
                        waiting[need] = rank
                        break
                    now = max(now, ready[need])
                starts[action] = now
                now += seconds[action]
                made = result[action]
                ready[made] = now
                target = self.target[action]
                if target >= 0:
                    sent = max(now, links.get((rank, target), 0.0)) + self.sending[action]
                    links[rank, target] = sent
                    ready[made] = sent + latency
                if made in waiting:
                    movable.append(waiting.pop(made))
                place += 1
                left -= 1
            places[rank], clocks[rank] = place, now
        return None if left else (max(clocks), starts)

    def fits(self, row: Sequence[int], rank: int) -> bool:
        """Whether ``rank`` stays within its cap when it runs ``row``."""
        now, cap = 0.0, self.caps[rank]
        if math.isinf(cap):
            return True
        cap += 1e-9 * cap
        for action in row:
            now += self.adds[action]
            if now > cap:
                return False
            now -= self.frees[action]
        return True

    def rows_of(self, schedule: Schedule) -> Rows:
        """A schedule's rows as numbers, each B as its I and W where it is no better whole."""
        return [
            [number for action in row for number in self._parts(action)] for row in schedule.ranks
        ]

    def _parts(self, action: Action) -> list[int]:
        number = self.number[action]
        if action.kind is not FULL or self.whole[action.stage]:
            return [number]
        return [self.part(number, INPUT), self.part(number, WEIGHT)]

    def schedule(self, name: str, rows: Rows) -> Schedule:
        """The schedule that runs ``rows``."""
        return Schedule(
            name,
            len(self.placement),
            self.microbatches,
            tuple(tuple(self.actions[number] for number in row) for row in rows),
            self.placement,
            split_backward=True,
        )
