"""What a rank keeps of its microbatches while it runs its part of a schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.moves import LevelByOrder, journeys_of, recomputed
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule

ROUNDING = 1 + 1e-9
"""Of a cap: by so much sums of what is kept may exceed it."""


_WORKSPACES = {
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 2,
    ActionKind.BACKWARD: 3,
}


class Change(NamedTuple):
    """By how much more is kept as soon as an action starts, and how much less once it has ended."""

    before: float
    after: float


_NONE = Change(0.0, 0.0)


@dataclass(frozen=True)
class StageMemory:
    """What one stage keeps of one microbatch, in bytes or any common unit.

    Attributes:
        saved: from F to the backward.
        deferred: from I to W.
        inputs: the stage's inputs, which are all that is kept of a microbatch whose F is to be run
            again.
        again: what that needs besides: the buffers that F writes.
        generators: likewise, the states of random generators.
        workspace: what F, I, W and B hold beside that while they run, messages with it.

    Raises:
        ScheduleError: a number that is negative or not finite.
    """

    saved: float
    deferred: float
    inputs: float = 0.0
    again: float = field(default=0.0, kw_only=True)
    generators: float = field(default=0.0, kw_only=True)
    workspace: tuple[float, float, float, float] = field(default=(0.0,) * 4, kw_only=True)

    def __post_init__(self) -> None:
        sizes = [("saved", self.saved), ("deferred", self.deferred), ("inputs", self.inputs)]
        sizes += [("again", self.again), ("generators", self.generators)]
        sizes += [("workspace", size) for size in self.workspace]
        for what, size in sizes:
            if not (math.isfinite(size) and size >= 0.0):
                raise ScheduleError(f"{what} must be a finite number >= 0, got {size!r}")

    def change(self, kind: ActionKind, *, again: bool = False) -> Change:
        """What a compute action changes; ``again``: of a microbatch whose F is run again."""
        before, after = self._held(kind, again=again)
        beside = self.workspace[_WORKSPACES.get(kind, 0)]
        if kind.is_memory:
            # The generators' present states are kept as well, and restored after F.
            beside += self.again + 2 * self.generators
        elif kind is ActionKind.FORWARD and again:
            beside += self.again + self.generators
        most = max(before, after, self.saved if kind is ActionKind.FORWARD else 0.0)
        return Change(most - before + beside, most - after + beside)

    def _held(self, kind: ActionKind, *, again: bool) -> tuple[float, float]:
        """What is kept of the microbatch before a compute action, and behind it."""
        if kind is ActionKind.FORWARD:
            return 0.0, self.dropped if again else self.saved
        if kind.is_memory:
            return self.dropped, self.saved
        if kind is ActionKind.BACKWARD_INPUT:
            return self.saved, self.deferred
        return (self.deferred if kind is ActionKind.BACKWARD_WEIGHT else self.saved), 0.0

    @property
    def dropped(self) -> float:
        """What is kept of a microbatch whose F is to be run again."""
        return self.inputs + self.again + self.generators

    def moved(self, *, deferred: bool) -> float:
        """How much travels when a microbatch is away, between I and W or before."""
        return self.deferred if deferred else self.saved

    @property
    def least(self) -> float:
        """What a rank holds at least at some moment of the microbatch, wherever the rest is."""
        split = max(
            max(self.saved, self.deferred) + self.workspace[1], self.deferred + self.workspace[2]
        )
        whole = self.saved + self.workspace[3]
        return max(self.saved + self.workspace[0], min(split, whole))


def levels_of(schedule: Schedule, sizes: Sequence[StageMemory]) -> list[Iterator[float]]:
    """Per rank, what it keeps at most while it runs each action of its row, whenever transfers
    happen.
    """
    moves = _moves(schedule, sizes)
    return [
        levels(row, _changes(row, sizes, own))
        for row, own in zip(schedule.ranks, moves, strict=True)
    ]


def _changes(
    row: Sequence[Action], sizes: Sequence[StageMemory], moves: Mapping[int, Change]
) -> list[Change]:
    """What each action of a row changes, as if moves took no time."""
    again = recomputed(row)
    return [
        sizes[action.stage].change(
            action.kind, again=bool(again) and (action.stage, action.microbatch) in again
        )
        if action.kind.is_compute
        else moves.get(place, _NONE)
        for place, action in enumerate(row)
    ]


def _moves(schedule: Schedule, sizes: Sequence[StageMemory]) -> list[dict[int, Change]]:
    """Per rank, by the place of a move what it changes."""
    found: list[dict[int, Change]] = [{} for _ in schedule.ranks]
    for journey in journeys_of(schedule):
        size = sizes[journey.stage].moved(deferred=journey.deferred)
        found[journey.rank][journey.leaves] = Change(0.0, size)
        found[journey.rank][journey.comes] = Change(size, 0.0)
        if journey.partner is not None:
            found[journey.partner][journey.accepted] = Change(size, 0.0)
            found[journey.partner][journey.returned] = Change(0.0, size)
    return found


def levels(row: Sequence[Action], changes: Sequence[Change]) -> Iterator[float]:
    """As ``levels_of``, of one row from what its actions change."""
    held = LevelByOrder(row)
    for action, change in zip(row, changes, strict=True):
        if action.kind.is_move:
            held.begin(action, change.before + change.after)  # one of them is nothing
            yield held.most
            continue
        held.begin(action)
        held.change(change.before)
        yield held.most
        held.change(-change.after)


def peak_memory(schedule: Schedule, sizes: Sequence[StageMemory]) -> list[float]:
    """Per rank, the most it keeps at once: a matter of order, not of time.

    Of what moves this is a bound, whatever transfers take (``LevelByOrder``).

    Raises:
        ScheduleError: not one size for each stage.
    """
    if len(sizes) != schedule.stages:
        raise ScheduleError(
            f"expected the memory of each of {schedule.stages} stages, got that of {len(sizes)}"
        )
    return [max(row, default=0.0) for row in levels_of(schedule, sizes)]
