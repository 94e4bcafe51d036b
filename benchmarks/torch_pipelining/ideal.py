"""What the order of a schedule leaves to gain, whoever runs it: simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.simulate import simulate

_UNIT = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.BACKWARD_INPUT: 1.0,
    ActionKind.BACKWARD_WEIGHT: 1.0,
}
_TWICE = _UNIT | {ActionKind.BACKWARD_INPUT: 2.0, ActionKind.BACKWARD_WEIGHT: 2.0}


@dataclasses.dataclass(frozen=True)
class Ideal:
    """Steps without overheads or messages, where F, I and W take as long as each other, and B as I
    and W.

    Attributes:
        split: backwards that are split, of all stages and microbatches.
        backwards: all of them.
        gain: the step with every I and W as one B in the place of the I, over that as it is.
        most: the step where each I and each W goes through the whole graph, as long as a B, over
            that as it is: what a stage that splits nothing twice can be faster by.
    """

    split: int
    backwards: int
    gain: float
    most: float

    @classmethod
    def of(cls, schedule: Schedule) -> Ideal:
        """That of a schedule."""
        kinds = [action.kind for row in schedule.ranks for action in row]
        split = kinds.count(ActionKind.BACKWARD_INPUT)
        step = _seconds(schedule, _UNIT)
        return cls(
            split,
            split + kinds.count(ActionKind.BACKWARD),
            _seconds(_unsplit(schedule), _UNIT) / step,
            _seconds(schedule, _TWICE) / step,
        )


def _unsplit(schedule: Schedule) -> Schedule:
    rows = tuple(
        tuple(map(_whole, (each for each in row if each.kind is not ActionKind.BACKWARD_WEIGHT)))
        for row in schedule.ranks
    )
    return dataclasses.replace(schedule, ranks=rows, split_backward=False)


def _whole(action: Action) -> Action:
    if action.kind is not ActionKind.BACKWARD_INPUT:
        return action
    return dataclasses.replace(action, kind=ActionKind.BACKWARD)


def _seconds(schedule: Schedule, units: Mapping[ActionKind, float]) -> float:
    return simulate(schedule, lambda action: units[action.kind]).makespan
