"""What a stage does better as it knows which action follows: I and W as a B, several W as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.placement.fusing import fuse_adjacent
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.runtime.gradient_graphs import Call
from autosplit.torch_internals.pipelining.schedules import RunningSchedule

_UNIT = (1.0, 1.0, 1.0)
_CALLS = {
    ActionKind.BACKWARD_INPUT: "backward_input",
    ActionKind.BACKWARD_WEIGHT: "backward_weight",
    ActionKind.BACKWARD: "backward",
}


@dataclass(frozen=True)
class ActionPlan:
    """How one rank's actions are run.

    Attributes:
        fused: stage and microbatch of each I that is run with its W, which follows it, as one B.
        joined: those of each W whose next action on this rank is W of the same stage.
        row: the actions.
    """

    fused: frozenset[tuple[int, int]] = frozenset()
    joined: frozenset[tuple[int, int]] = frozenset()
    row: Sequence[Action] = ()

    @classmethod
    def of(cls, running: RunningSchedule, rank: int) -> ActionPlan:
        """The plan for one rank of a schedule that runs."""
        if not running.rows:
            return cls()
        rows = tuple(tuple(map(Action.parse, row)) for row in running.rows)
        mine = rows[rank]
        return cls(_fused(running, rows, rank), frozenset(_joined(mine)), mine)

    def calls(self, stage: int, *, joined: bool) -> list[Call]:
        """The calls of a stage's graphs in one step, in their order.

        Args:
            stage: the stage.
            joined: whether Ws that follow each other are one call.
        """
        found: list[Call] = []
        together = 1
        for action in self.row:
            place = (action.stage, action.microbatch)
            if action.stage != stage or action.kind not in _CALLS:
                continue
            if action.kind is ActionKind.BACKWARD_WEIGHT:
                if place in self.fused:
                    continue
                if joined and place in self.joined:
                    together += 1
                    continue
                found.append(("backward_weight", together))
                together = 1
            else:
                found.append("backward" if place in self.fused else _CALLS[action.kind])
        return found or ["backward"] * 2


def _fused(
    running: RunningSchedule, rows: tuple[tuple[Action, ...], ...], rank: int
) -> frozenset[tuple[int, int]]:
    """Is that become a B where no other rank waits for their gradient, by unit times."""
    count = len(running.placement)
    placement = tuple(running.placement[stage] for stage in range(count))
    split = any(a.kind is ActionKind.BACKWARD_INPUT for row in rows for a in row)
    if not split:
        return frozenset()
    schedule = Schedule(running.name, count, running.microbatches, rows, placement, split)
    costs = Costs([_UNIT] * count, [StageMemory(1.0, 1.0)] * count)
    try:
        fused = fuse_adjacent(schedule, costs)
    except ScheduleError:  # such as one that torch's own lowering will refuse
        return frozenset()
    before = _wholes(rows[rank])
    return frozenset(_wholes(fused.ranks[rank]) - before)


def _wholes(row: Sequence[Action]) -> set[tuple[int, int]]:
    return {(a.stage, a.microbatch) for a in row if a.kind is ActionKind.BACKWARD}


def _joined(row: Sequence[Action]) -> set[tuple[int, int]]:
    pairs = pairwise(row)
    return {
        (a.stage, a.microbatch)
        for a, b in pairs
        if a.kind is b.kind is ActionKind.BACKWARD_WEIGHT and a.stage == b.stage
    }
