"""Plays orders that hold moves, without a graph for each: for searches that change row after row.

Times are those of ``simulate``, of actions that run where their row has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autosplit.mesh.link import Link
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.step_frame import StepFrame
from autosplit.pipeline.simulation.transfer import Transfer

from .row_programs import Row, RowProgram, peak_of, read_row
from .row_run import Carried, Lane, Place, RowRun

_MOST_ROWS = 4096  # that are known at once
_TO_PARTNER = (ActionKind.EVICT, ActionKind.RETURN)


class PlayedRows(NamedTuple):
    """How an order ran.

    Attributes:
        makespan: when the last action ended.
        starts: when each compute action began.
        peaks: per rank, the most that it holds, by order.
    """

    makespan: float
    starts: Mapping[Action, float]
    peaks: list[float]


class RowPlayer:
    """Plays schedules of one frame.

    Args:
        frame: the compute actions.
        memory: by stage.
        transfer: the links.
    """

    def __init__(self, frame: StepFrame, memory: Sequence[StageMemory], transfer: Transfer) -> None:
        self.frame = frame
        self._memory = memory
        self._transfer = transfer
        self._known: dict[frozenset[tuple[int, int]], dict[tuple[int, int], RowProgram]] = {}
        """By what is moved of each stage: programs by rank and identity of the row."""
        self._moved: Mapping[int, int] = {}
        self._programs: dict[tuple[int, int], RowProgram] = {}

    def play(self, schedule: Schedule) -> PlayedRows | None:
        """How a legal schedule runs; None if it cannot."""
        programs = self._programs_of(schedule)
        lanes = self._lanes(schedule, programs)
        run = RowRun(self.frame, programs, lanes, self._lost(programs, lanes))
        if not run.ends():
            return None
        starts = _Starts(self.frame.numbers, run.starts)
        return PlayedRows(max(run.clocks, default=0.0), starts, self._peaks(schedule, programs))

    def peaks(self, schedule: Schedule) -> list[float]:
        """Per rank, the most that it holds by order, of a legal schedule."""
        return self._peaks(schedule, self._programs_of(schedule))

    def _programs_of(self, schedule: Schedule) -> list[RowProgram]:
        if schedule.moved is not self._moved or len(self._programs) > _MOST_ROWS:
            if sum(map(len, self._known.values())) > _MOST_ROWS:
                self._known.clear()
            self._moved = schedule.moved
            self._programs = self._known.setdefault(frozenset(self._moved.items()), {})
        return [self._program(row, rank) for rank, row in enumerate(schedule.ranks)]

    def _program(self, row: Row, rank: int) -> RowProgram:
        known = self._programs.get((rank, id(row)))
        if known is None:
            known = read_row(
                row, self.frame.numbers, self._memory, self._moved, self._transfer.moves
            )
            self._programs[rank, id(row)] = known
        return known

    def _lanes(
        self, schedule: Schedule, programs: Sequence[RowProgram]
    ) -> dict[Lane, list[Carried]]:
        """The transfers of each lane, in order."""
        lanes: dict[Lane, list[Carried]] = defaultdict(list)
        host = self._transfer.host or Link()
        for rank, program in enumerate(programs):
            if not program.keys:
                continue
            partner = rank if schedule.partners is None else schedule.partners[rank]
            there = {
                (programs[partner].row[place].kind, key): place
                for place, key in programs[partner].keys.items()
            }
            for place, key in program.keys.items():
                kind, here = program.row[place].kind, (rank, place)
                if kind is ActionKind.OFFLOAD:
                    took = program.sizes[key] / host.bandwidth
                    lanes[rank, "out"].append(
                        Carried((here,), (), None, took, host.latency, here, None)
                    )
                elif kind is ActionKind.RELOAD:
                    took = program.sizes[program.keys[program.left[place]]] / host.bandwidth
                    waits = tuple((rank, each) for each in program.lane_waits[place])
                    left = rank, program.left[place]
                    lanes[rank, "in"].append(
                        Carried(
                            (here,), waits, (left, host.latency), took, host.latency, here, here
                        )
                    )
                elif kind in _TO_PARTNER:
                    out = kind is ActionKind.EVICT
                    comes = there[ActionKind.ACCEPT if out else ActionKind.LOAD, key]
                    link = self._transfer.link(rank, partner)
                    sizes = program.sizes if out else programs[partner].sizes
                    lane_waits = programs[partner].lane_waits[comes]
                    lanes[rank, partner].append(
                        Carried(
                            (here, (partner, comes)),
                            tuple((partner, each) for each in lane_waits),
                            None if out else ((rank, program.left[place]), 0.0),
                            sizes[key] / link.bandwidth,
                            link.latency,
                            here,
                            (partner, comes),
                        )
                    )
        return lanes

    def _lost(
        self, programs: Sequence[RowProgram], lanes: Mapping[Lane, Sequence[Carried]]
    ) -> dict[Place, float]:
        """Seconds of computing that ranks lose to transfers, by the places that begin them."""
        slowing = self._transfer.moves.slowing
        if not slowing:
            return {}
        return {
            (rank, place): slowing * each.took
            for carried in lanes.values()
            for each in carried
            for rank, place in each.reached
            if place in programs[rank].beside
        }

    def _peaks(self, schedule: Schedule, programs: Sequence[RowProgram]) -> list[float]:
        found = []
        for rank, program in enumerate(programs):
            guests: tuple[float, ...] = ()
            if program.keys:
                partner = rank if schedule.partners is None else schedule.partners[rank]
                sizes = programs[partner].sizes
                guests = tuple(
                    sizes[key]
                    for place, key in program.keys.items()
                    if program.row[place].kind is ActionKind.ACCEPT
                )
            peak = program.peaks.get(guests)
            if peak is None:
                peak = program.peaks[guests] = peak_of(program, guests)
            found.append(peak)
        return found


class _Starts(Mapping[Action, float]):
    """By action, when it began; made only where it is asked for."""

    def __init__(self, numbers: Mapping[Action, int], starts: Sequence[float]) -> None:
        self._numbers = numbers
        self._starts = starts

    def __getitem__(self, action: Action) -> float:
        return self._starts[self._numbers[action]]

    def __iter__(self) -> Iterator[Action]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)
