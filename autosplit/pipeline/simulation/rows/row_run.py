"""One play of rows that were read: ranks and lanes go on in turns, each until it has to wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autosplit.pipeline.simulation.step_frame import StepFrame

from .row_programs import RowProgram

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
