"""Compute the memory of activations that a rank keeps while it runs its row of a schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.moves import WorstCaseMemory, find_moves, recomputed_microbatches
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule

ROUNDING = 1 + 1e-9
"""Tolerance when a sum of memory is compared with a limit."""


_WORKSPACES = {
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 2,
    ActionKind.BACKWARD: 3,
}


class Change(NamedTuple):
    """The memory that an action allocates at its start, and the memory that it frees at its end."""

    allocated: float
    freed: float


_NONE = Change(0.0, 0.0)


@dataclass(frozen=True)
class StageMemory:
    """The memory of one microbatch on one stage, in bytes or any common unit.

    Attributes:
        saved: memory kept from F to the backward.
        deferred: memory kept from I to W.
        inputs: memory of the stage's inputs, which are all that a microbatch keeps if it will be
            recomputed.
        again: memory that recomputing needs for copies of the buffers that F writes.
        generators: memory that recomputing needs for the states of random generators.
        workspace: additional memory of F, I, W and B while they run, messages included.

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
        for name, size in sizes:
            if not (math.isfinite(size) and size >= 0.0):
                raise ScheduleError(f"{name} must be a finite number >= 0, got {size!r}")

    def change(self, kind: ActionKind, *, again: bool = False) -> Change:
        """The memory that a compute action allocates and frees.

        Args:
            kind: the kind of the action.
            again: whether the microbatch is recomputed.
        """
        at_start, at_end = self._kept(kind, again=again)
        beside = self.workspace[_WORKSPACES.get(kind, 0)]
        if kind.is_memory:
            # The generators' present states are kept as well, and restored after F.
            beside += self.again + 2 * self.generators
        elif kind is ActionKind.FORWARD and again:
            beside += self.again + self.generators
        runs_forward = kind is ActionKind.FORWARD or kind.is_memory
        kept = self.saved if runs_forward else max(at_start, at_end)
        most = max(at_start, at_end, kept + beside)
        return Change(most - at_start, most - at_end)

    def _kept(self, kind: ActionKind, *, again: bool) -> tuple[float, float]:
        """(memory that the microbatch keeps before a compute action, memory that it keeps after
        it).
        """
        if kind is ActionKind.FORWARD:
            return 0.0, self.dropped if again else self.saved
        if kind.is_memory:
            return self.dropped, self.saved
        if kind is ActionKind.BACKWARD_INPUT:
            return self.saved, self.deferred
        return (self.deferred if kind is ActionKind.BACKWARD_WEIGHT else self.saved), 0.0

    @property
    def dropped(self) -> float:
        """The memory that a microbatch holds until its RECOMPUTE, in place of saved tensors."""
        return self.inputs + self.again + self.generators

    def moved(self, *, deferred: bool) -> float:
        """The memory that a move transfers: deferred tensors between I and W, else saved
        tensors.
        """
        return self.deferred if deferred else self.saved

    @property
    def least(self) -> float:
        """The least peak of a rank that runs the microbatch, whatever is moved or recomputed."""
        split = max(
            max(self.saved, self.deferred) + self.workspace[1], self.deferred + self.workspace[2]
        )
        whole = self.saved + self.workspace[3]
        return max(self.saved + self.workspace[0], min(split, whole))


def largest_memory(rows: Sequence[StageMemory]) -> StageMemory:
    """The maximum of several ``StageMemory`` in every number, for steps with several sizes of
    microbatches.
    """
    *columns, workspaces = zip(*map(astuple, rows), strict=True)
    saved, deferred, inputs, again, generators = map(max, columns)
    workspace: Any = tuple(map(max, zip(*workspaces, strict=True)))
    return StageMemory(
        saved, deferred, inputs, again=again, generators=generators, workspace=workspace
    )


def levels_of(schedule: Schedule, sizes: Sequence[StageMemory]) -> list[Iterator[float]]:
    """Per rank, the most memory that it keeps while each action of its row runs, however long
    transfers take.
    """
    moves = _moves(schedule, sizes)
    return [
        levels(row, _changes(row, sizes, row_moves))
        for row, row_moves in zip(schedule.ranks, moves, strict=True)
    ]


def _changes(
    row: Sequence[Action], sizes: Sequence[StageMemory], moves: Mapping[int, Change]
) -> list[Change]:
    """The memory that each action of a row allocates and frees, as if moves took no time."""
    again = recomputed_microbatches(row)
    return [
        sizes[action.stage].change(
            action.kind, again=bool(again) and (action.stage, action.microbatch) in again
        )
        if action.kind.is_compute
        else moves.get(place, _NONE)
        for place, action in enumerate(row)
    ]


def _moves(schedule: Schedule, sizes: Sequence[StageMemory]) -> list[dict[int, Change]]:
    """For each rank, maps the place of a move to the memory that the move allocates and frees."""
    changes: list[dict[int, Change]] = [{} for _ in schedule.ranks]
    for move in find_moves(schedule):
        size = sizes[move.stage].moved(deferred=move.deferred)
        changes[move.rank][move.leaves] = Change(0.0, size)
        changes[move.rank][move.comes] = Change(size, 0.0)
        if move.partner is not None:
            changes[move.partner][move.accepted] = Change(size, 0.0)
            changes[move.partner][move.returned] = Change(0.0, size)
    return changes


def levels(row: Sequence[Action], changes: Sequence[Change]) -> Iterator[float]:
    """The memory that one rank keeps while each action of its row runs; see ``levels_of``."""
    memory = WorstCaseMemory(row)
    for action, change in zip(row, changes, strict=True):
        if action.kind.is_move:
            memory.begin_action(action, change.allocated + change.freed)  # one of them is 0
            yield memory.most
            continue
        memory.begin_action(action)
        memory.add_bytes(change.allocated)
        yield memory.most
        memory.add_bytes(-change.freed)


def peak_memory(schedule: Schedule, sizes: Sequence[StageMemory]) -> list[float]:
    """Per rank, the peak of the memory that the rank keeps. The peak depends on the order of rows,
    not on time.

    With moves the peak is an upper bound, however long transfers take (``WorstCaseMemory``).

    Raises:
        ScheduleError: the number of sizes is not the number of stages.
    """
    if len(sizes) != schedule.stages:
        raise ScheduleError(
            f"expected one StageMemory for each of {schedule.stages} stages, got {len(sizes)}"
        )
    return [max(row, default=0.0) for row in levels_of(schedule, sizes)]
