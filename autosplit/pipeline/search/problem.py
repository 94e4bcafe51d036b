"""The scheduling problem: all actions of a step with what they take and keep, under caps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.activation_memory import ROUNDING
from autosplit.pipeline.simulation.early_weights import EarlyWeights, cutter
from autosplit.pipeline.simulation.event_loop import Play, play
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.step_graph import StepGraph

KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
    ActionKind.BACKWARD,
)
FORWARD, INPUT, WEIGHT, FULL = KINDS

Rows = list[list[int]]
"""Per rank, the numbers of its actions in order."""


class Problem(StepGraph):
    """Every F, I, W and B of a step, numbered, with what it needs, takes and keeps.

    An order has either the B of a stage and a microbatch or its I and W.

    Args:
        costs: of every stage.
        placement: ``placement[stage]`` is the rank that holds the stage.
        microbatches: M.
        caps: per rank, the most it may keep at once.

    Attributes:
        room: per rank, its cap with what rounding may add.
        number: of every action.
        seconds: per action.
        placed_seconds: per action, the seconds it takes where the order has it.
        slices: per action, the seconds of each part of a W that may run in a wait; none for other
            actions, and none at all where Ws run as they are scheduled.
        adds: per action, how much more is kept as soon as it starts.
        frees: per action, how much less once it has ended.
        whole: per stage, whether a B can be better than its I and W.
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
        self.room = [cap * ROUNDING for cap in caps]
        actions = [
            Action(stage, kind, microbatch)
            for stage in range(len(placement))
            for kind in KINDS
            for microbatch in range(microbatches)
        ]
        self.number = {action: number for number, action in enumerate(actions)}
        super().__init__(
            self.schedule("", []),
            ((placement[action.stage], action) for action in actions),
            feeds=None if costs.wiring is None else Feeds(len(placement), costs.wiring),
            transfer=costs.transfer,
            own_needs=False,  # rows have F before I before W
        )
        self.slices = self._cut()
        self.seconds = [
            sum(parts) if parts else costs.seconds(action)
            for action, parts in zip(self.actions, self.slices, strict=True)
        ]
        self.placed_seconds = [
            0.0 if parts else took for parts, took in zip(self.slices, self.seconds, strict=True)
        ]
        self.adds = [costs.memory[a.stage].before(a.kind) for a in self.actions]
        self.frees = [costs.memory[a.stage].after(a.kind) for a in self.actions]
        self.whole = [self._is_better_whole(stage) for stage in range(len(placement))]
        self._inputs = self.inputs_of_weights()

    def _cut(self) -> list[Sequence[float]]:
        if not self.costs.early_weights:
            return [() for _ in self.actions]
        cut = cutter(self.costs.slices)
        return [
            cut(action.stage, self.costs.seconds(action)) if action.kind is WEIGHT else ()
            for action in self.actions
        ]

    def _is_better_whole(self, stage: int) -> bool:
        """Whether a B of ``stage`` can be better than its I and W: shorter, or keeping less.

        Otherwise an I hands on its gradient earlier, and costs nothing more.
        """
        size, (_, inputs, weights) = self.costs.memory[stage], self.costs.times[stage]
        bounded = not math.isinf(self.caps[self.placement[stage]])
        shorter = self.costs.full is not None and self.costs.full[stage] < inputs + weights
        return shorter or (bounded and size.deferred > size.saved)

    def play(self, rows: Rows) -> Play | None:
        """How ``rows`` run, with the times of ``simulate``; None if they deadlock."""
        early = []
        if self.costs.early_weights:
            seconds, slices, inputs = self.placed_seconds, self.slices, self._inputs
            early = [EarlyWeights(row, seconds, slices, inputs) for row in rows]
        played = play(self, rows, self.placed_seconds, early)
        return played if played.places == list(map(len, rows)) else None

    def part(self, action: int, kind: ActionKind) -> int:
        """The number of the same stage's ``kind`` on the same microbatch."""
        own = action // self.microbatches % len(KINDS)
        return action + (KINDS.index(kind) - own) * self.microbatches

    def fits(self, row: Sequence[int], rank: int) -> bool:
        """Whether ``rank`` stays within its cap when it runs ``row``."""
        now, cap = 0.0, self.room[rank]
        if math.isinf(cap):
            return True
        for action in row:
            now += self.adds[action]
            if now > cap:
                return False
            now -= self.frees[action]
        return True

    def numbers_of(self, schedule: Schedule) -> Rows:
        """A schedule's rows as numbers."""
        return [[self.number[action] for action in row] for row in schedule.ranks]

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
