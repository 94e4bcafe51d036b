"""Moves of memory in a simulated step: who waits for what, and what a lane carries when.

A lane is what carries moves from one rank to its partner, or between a rank and its store on the
host, one after another, in the order of the sender's row. To the simulator's core it is a rank of
its own, whose actions are the transfers.

Ranks lose no time to them: on an accelerator copy engines carry them. On a CPU whose cores all
compute, threads that copy take time from what is computed beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.moves import Journey, journeys_of, waited_departures
from autosplit.pipeline.schedule.routes import Parcel
from autosplit.pipeline.schedule.schedule import ARRIVALS, Action, Schedule

from .activation_memory import StageMemory
from .step_graph import INSTANT, Message, StepGraph
from .transfer import Transfer


@dataclass
class Lanes:
    """The transfers of a step, as rows of further actions of its graph.

    Attributes:
        rows: per rank, the numbers of its actions, then per lane those of its transfers, in order.
        took: per transfer, the seconds for which it keeps its lane.
        latency: per transfer, the seconds from then until all is there.
        ends: of every move of a rank, its rank, its action and its transfer.
    """

    rows: list[Sequence[int]]
    took: dict[int, float] = field(default_factory=dict)
    latency: dict[int, float] = field(default_factory=dict)
    ends: list[tuple[int, Action, int]] = field(default_factory=list)

    def spans(self, starts: Sequence[float]) -> Iterator[tuple[int, Action, float, float]]:
        """Rank, action, start and end of every move, from when each transfer started."""
        for rank, action, number in self.ends:
            end = starts[number] + self.took[number]
            arrives = action.kind in ARRIVALS
            yield rank, action, starts[number], end + arrives * self.latency[number]


def add_lanes(
    graph: StepGraph,
    schedule: Schedule,
    rows: Sequence[Sequence[int]],
    seconds: list[float],
    transfer: Transfer = INSTANT,
    memory: Sequence[StageMemory] | None = None,
) -> Lanes:
    """Add the transfers of a schedule to its own step graph, with all that waits for them.

    Args:
        graph: of the schedule; gets further actions.
        schedule: whose moves.
        rows: per rank, the numbers of its actions.
        seconds: per action; gets those of the transfers.
        transfer: the links.
        memory: by stage.

    Raises:
        ScheduleError: a link has a bandwidth, and what travels is not known.
    """
    journeys = journeys_of(schedule)
    if not journeys:
        return Lanes([*rows])
    builder = _Builder(graph, rows)
    for journey in journeys:
        builder.add(journey, _took(schedule, transfer, memory, journey))
    builder.close(schedule)
    seconds += builder.lanes.took.values()
    return builder.lanes


def _took(
    schedule: Schedule,
    transfer: Transfer,
    memory: Sequence[StageMemory] | None,
    journey: Journey,
) -> tuple[float, float]:
    """Seconds for which each way of a journey keeps its lane, and then to its arrival."""
    link = transfer.host or Link()
    if journey.partner is not None:
        link = Link(transfer.latency, transfer.bandwidth)
    if math.isinf(link.bandwidth):
        return 0.0, link.latency
    if memory is None:
        raise ScheduleError(
            f"schedule {schedule.name!r} moves what stage {journey.stage} holds of microbatch "
            f"{journey.microbatch}, and the link has a bandwidth: give the memory of every stage"
        )
    size = memory[journey.stage].moved(deferred=journey.deferred)
    return size / link.bandwidth, link.latency


class _Builder:
    def __init__(self, graph: StepGraph, rows: Sequence[Sequence[int]]) -> None:
        self.lanes = Lanes([*rows])
        self._graph = graph
        self._rows = rows
        self._queues: dict[tuple[int, int | str], list[tuple[int, int]]] = {}
        """By lane, its transfers, each behind the place of the move that starts it."""
        self._transfers: dict[tuple[int, int], int] = {}
        """By rank and place, the transfer of a move."""
        self._parcels: dict[tuple[int, int, float], int] = {}
        """By an action and the row that waits for it, and for how long after it."""

    def add(self, journey: Journey, took: tuple[float, float]) -> None:
        """The two transfers of a journey, and who starts and awaits them; ``took`` is how long each
        keeps its lane, and then is on its way.
        """
        owner, partner, rows = journey.rank, journey.partner, self._rows
        ends = [(owner, journey.leaves), (owner, journey.comes)]
        if partner is None:
            out = self._transfer((owner, "out"), owner, journey.leaves, took)
            back = self._transfer((owner, "in"), owner, journey.comes, took)
        else:
            out = self._transfer((owner, partner), owner, journey.leaves, took)
            back = self._transfer((partner, owner), partner, journey.returned, took)
            ends += [(partner, journey.accepted), (partner, journey.returned)]
        for (rank, place), transfer in zip(ends, (out, back, out, back), strict=False):
            move = rows[rank][place]
            self._edge(move, transfer)
            self.lanes.ends.append((rank, self._graph.actions[move], transfer))
            self._transfers[rank, place] = transfer
        self._edge(out, back, took[1])
        self._edge(back, rows[owner][journey.used], took[1])

    def close(self, schedule: Schedule) -> None:
        """Put the lanes in order, and let ranks wait for what has to have left."""
        self.lanes.rows += [[number for _, number in sorted(q)] for q in self._queues.values()]
        # What one transfer of a lane waits for, those behind it need not.
        told: set[tuple[int, int]] = set()
        for rank, row in enumerate(schedule.ranks):
            for place, departures in waited_departures(row):
                waiting: int | None = self._rows[rank][place]
                if row[place].kind.is_move:
                    waiting = self._transfers.get((rank, place))
                for each in departures:
                    departure = self._transfers.get((rank, each))
                    if waiting is None or departure is None:
                        continue
                    if (self._graph.ranks[waiting], departure) not in told:
                        told.add((self._graph.ranks[waiting], departure))
                        self._edge(departure, waiting)

    def _transfer(
        self,
        lane: tuple[int, int | str],
        rank: int,
        place: int,
        took: tuple[float, float],
    ) -> int:
        graph, queue = self._graph, self._queues.setdefault(lane, [])
        row = len(self._rows) + [*self._queues].index(lane)
        number = graph.add(row, graph.actions[self._rows[rank][place]])
        queue.append((place, number))
        self.lanes.took[number], self.lanes.latency[number] = took
        return number

    def _edge(self, maker: int, taker: int, latency: float = 0.0) -> None:
        """``taker`` waits for the end of ``maker``, and ``latency`` after that."""
        graph = self._graph
        known = self._parcels.get((maker, graph.ranks[taker], latency))
        if known is not None:
            graph.needs[taker] += (known,)
            return
        parcel = len(graph.parcels)
        self._parcels[maker, graph.ranks[taker], latency] = parcel
        graph.parcels.append(Parcel(graph.actions[maker], graph.actions[taker].stage))
        graph.takers.append(graph.ranks[taker])
        graph.makers.append(maker)
        graph.needs[taker] += (parcel,)
        # A link of its own: what is on its way here holds up nothing else.
        link = (-1 - parcel, -1 - parcel) if latency else None
        graph.makes[maker] += (Message(parcel, link, 0.0, latency),)
