"""Rows read once for many plays: what waits for what, and what each action changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from autosplit.pipeline.schedule.action import ARRIVALS, Action, ActionKind
from autosplit.pipeline.schedule.moves import recomputed, waited_departures
from autosplit.pipeline.simulation.activation_memory import Change, StageMemory, levels, moved_bytes
from autosplit.pipeline.simulation.rank_time import time_of_rank
from autosplit.pipeline.simulation.transfer import FREE_MOVES, MoveCosts

_TO_HOST = (ActionKind.OFFLOAD, ActionKind.RELOAD)
_NONE = Change(0.0, 0.0)

Row = tuple[Action, ...]
Key = tuple[int, int, bool, int]
"""Stage and microbatch, whether in the host's store, and how often they were there before."""


class RowEntry(NamedTuple):
    """What a rank does at one place of its row.

    Attributes:
        number: of a compute action in the frame; -1 for others.
        waits: the places of departures that the rank waits for.
        use: that of the arrival that it uses; -1 for none.
        spent: seconds that moves take of the rank there, whatever transfers take.
    """

    number: int
    waits: Sequence[int]
    use: int
    spent: float = 0.0


@dataclass(eq=False)
class RowProgram:
    """A row, read once.

    Attributes:
        row: it is known by its identity.
        steps: by place.
        lane_waits: by the place of an arrival, departures that its lane waits for.
        left: by the place of a LOAD, RELOAD or RETURN, that of the move before it here.
        keys: by the place of a move, whose it is.
        sizes: how much travels of what is the rank's own.
        changes: by place, of compute actions.
        beside: the places of moves whose transfers run beside computation and slow it down.
        peaks: by how much comes from the partner, the most that is held.
    """

    row: Row
    steps: list[RowEntry]
    lane_waits: dict[int, list[int]]
    left: dict[int, int]
    keys: dict[int, Key]
    sizes: dict[Key, float]
    changes: list[Change]
    beside: AbstractSet[int] = frozenset()
    peaks: dict[tuple[float, ...], float] = field(default_factory=dict)


class _Reader:
    """Goes through one row."""

    def __init__(
        self,
        row: Row,
        numbers: Mapping[Action, int],
        memory: Sequence[StageMemory],
        moved: Mapping[int, int],
    ) -> None:
        self.program = RowProgram(row, [], {}, {}, {}, {}, [])
        self._numbers, self._memory, self._moved = numbers, memory, moved
        self._again = recomputed(row)
        self._waits = dict(waited_departures(row))
        self._counts: dict[tuple[int, int, ActionKind], int] = defaultdict(int)
        self._away: dict[tuple[int, int], int] = {}
        self._back: dict[tuple[int, int], int] = {}
        self._deferred: set[tuple[int, int]] = set()

    def spend(self, costs: MoveCosts) -> None:
        """Note what moves take of the rank."""
        if costs == FREE_MOVES:
            return
        found = self.program
        own, found.beside = time_of_rank(found.row, costs)
        for place, seconds in own.items():
            found.steps[place] = found.steps[place]._replace(spent=seconds)

    def compute(self, place: int, action: Action) -> None:
        kind, at, use = action.kind, (action.stage, action.microbatch), -1
        if kind not in (ActionKind.FORWARD, ActionKind.RECOMPUTE):
            use = self._back.pop(at, -1)
            if kind is ActionKind.BACKWARD_INPUT:
                self._deferred.add(at)
        waits = self._waits.get(place, ())
        self.program.steps.append(RowEntry(self._numbers[action], waits, use))
        size = self._memory[action.stage]
        self.program.changes.append(size.change(kind, again=at in self._again))

    def wait(self, place: int) -> None:
        self.program.steps.append(RowEntry(-1, self._waits.get(place, ()), -1))
        self.program.changes.append(_NONE)

    def move(self, place: int, action: Action) -> None:
        found, kind, at = self.program, action.kind, (action.stage, action.microbatch)
        found.steps.append(RowEntry(-1, (), -1))
        found.changes.append(_NONE)
        key = found.keys[place] = (*at, kind in _TO_HOST, self._counts[*at, kind])
        self._counts[*at, kind] += 1
        if kind in (ActionKind.EVICT, ActionKind.OFFLOAD):
            self._away[at] = place
            size, deferred = self._memory[action.stage], at in self._deferred
            found.sizes[key] = moved_bytes(self._moved, action.stage, size, deferred=deferred)
            return
        if kind is not ActionKind.ACCEPT:
            found.left[place] = self._away[at]
        if kind in ARRIVALS:
            found.lane_waits[place] = self._waits.get(place, [])
            ends = self._away if kind is ActionKind.ACCEPT else self._back
            ends[at] = place


def read_row(
    row: Row,
    numbers: Mapping[Action, int],
    memory: Sequence[StageMemory],
    moved: Mapping[int, int],
    costs: MoveCosts,
) -> RowProgram:
    """Read a row of a legal schedule.

    Args:
        row: the row.
        numbers: of compute actions.
        memory: by stage.
        moved: see ``Schedule.moved``.
        costs: what moves take of ranks.
    """
    reader = _Reader(row, numbers, memory, moved)
    for place, action in enumerate(row):
        if action.kind.is_compute:
            reader.compute(place, action)
        elif action.kind is ActionKind.AWAIT:
            reader.wait(place)
        else:
            reader.move(place, action)
    reader.spend(costs)
    return reader.program


def peak_of(program: RowProgram, guests: Sequence[float]) -> float:
    """The most that is held by the order of a row."""
    changes, coming = [*program.changes], iter(guests)
    staying: dict[tuple[int, int], float] = {}
    for place, key in program.keys.items():
        action = program.row[place]
        at = action.stage, action.microbatch
        if action.kind is ActionKind.ACCEPT:
            staying[at] = next(coming)
            changes[place] = Change(staying[at], 0.0)
        elif action.kind is ActionKind.RETURN:
            changes[place] = Change(0.0, staying[at])
        elif action.kind in ARRIVALS:
            changes[place] = Change(program.sizes[program.keys[program.left[place]]], 0.0)
        else:
            changes[place] = Change(0.0, program.sizes[key])
    return max(levels(program.row, changes), default=0.0)
