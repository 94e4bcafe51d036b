"""Plays orders that hold moves, without a graph for each: for searches that change row after row.

Times are those of ``simulate``, of actions that run where their row has them.

One play of rows that were read: ranks and lanes go on in turns, each until it has to wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.step_frame import StepFrame
from autosplit.pipeline.simulation.transfer import Transfer

from .row_programs import Row, RowProgram, peak_of, read_row

Place = tuple[int, int]
"""Rank, and place in its row."""
Lane = tuple[int, int | str]
"""A rank, and its partner, or which way from or to its host."""


class Carried(NamedTuple):
    """One transfer.

    Attributes:
        reached: where ranks must have come.
        waits: what must have left.
        behind: what must have come before, or nothing, and for how long.
        took: seconds on its lane.
        latency: from then to its arrival.
        left: the place at which it departs, if that counts.
        comes: that at which it arrives, if it does.
    """

    reached: tuple[Place, ...]
    waits: tuple[Place, ...]
    behind: tuple[Place, float] | None
    took: float
    latency: float
    left: Place
    comes: Place | None


class RowRun:
    """One step."""

    def __init__(
        self,
        frame: StepFrame,
        programs: Sequence[RowProgram],
        lanes: Mapping[Lane, Sequence[Carried]],
        lost: Mapping[Place, float],
    ) -> None:
        graph = frame.graph
        self._needs, self._makes, self._seconds = graph.needs, graph.makes, frame.seconds
        self._sending = graph.sending
        self._programs = programs
        self._lost = lost
        self._lanes = [*lanes.values()]
        self._carried = [0] * len(self._lanes)
        self._free = [0.0] * len(self._lanes)
        self._ready = [-1.0] * len(graph.takers)
        self._links: dict[tuple[int, int], float] = {}
        self._places = [0] * len(programs)
        self._reached = [[-1.0] * len(program.row) for program in programs]
        self._over = [[-1.0] * len(program.row) for program in programs]
        self.clocks = [0.0] * len(programs)
        self.starts = [-1.0] * len(graph.needs)

    def ends(self) -> bool:
        """Run as far as it goes; whether that is to the end."""
        going = True
        while going:
            going = False
            for rank in range(len(self._programs)):
                going = self._compute(rank) or going
            for lane in range(len(self._lanes)):
                going = self._carry(lane) or going
        return self._places == [len(each.steps) for each in self._programs]

    def _compute(self, rank: int) -> bool:
        """Let a rank go on until it waits for something; whether it did."""
        steps, over, reached = self._programs[rank].steps, self._over[rank], self._reached[rank]
        needs, ready, seconds, lost = self._needs, self._ready, self._seconds, self._lost
        begun, now = self._places[rank], self.clocks[rank]
        place = begun
        while place < len(steps):
            number, waits, use, spent = steps[place]
            if number < 0 and not waits:
                now += spent + lost.get((rank, place), 0.0)
                reached[place] = now
                place += 1
                continue
            start = now
            ends = [over[each] for each in waits]
            if use >= 0:
                ends.append(over[use])
            if number >= 0:
                ends += [ready[parcel] for parcel in needs[number]]
            if ends:
                if min(ends) < 0.0:
                    break
                start = max(start, *ends)
            if number >= 0:
                self.starts[number] = start
                start += seconds[number] + spent
                self._send(number, start)
                start += self._sending[number]
            now = start
            place += 1
        self._places[rank], self.clocks[rank] = place, now
        return place > begun

    def _send(self, number: int, now: float) -> None:
        ready, links = self._ready, self._links
        for parcel, link, took, latency in self._makes[number]:
            if ready[parcel] >= 0.0:
                continue
            if link is None:
                ready[parcel] = now
            else:
                free = links.get(link, 0.0)
                links[link] = free = (free if free > now else now) + took
                ready[parcel] = free + latency

    def _carry(self, lane: int) -> bool:
        """Likewise a lane."""
        carried, begun = self._lanes[lane], self._carried[lane]
        place, free = begun, self._free[lane]
        while place < len(carried):
            each = carried[place]
            ends = [self._reached[rank][at] for rank, at in each.reached]
            ends += [self._over[rank][at] for rank, at in each.waits]
            if each.behind is not None:
                (rank, at), since = each.behind
                came = self._over[rank][at]
                ends.append(came if came < 0.0 else came + since)
            if min(ends) < 0.0:
                break
            free = max(free, *ends) + each.took
            rank, at = each.left
            self._over[rank][at] = free
            if each.comes is not None:
                rank, at = each.comes
                self._over[rank][at] = free + each.latency
            place += 1
        self._carried[lane], self._free[lane] = place, free
        return place > begun


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
