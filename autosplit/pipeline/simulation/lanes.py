"""Moves of memory in a simulated step: who waits for what, and what a lane carries when.

A lane is what carries moves from one rank to its partner, or between a rank and its store on the
host, one after another, in the order of the sender's row. To the simulator's core it is a rank of
its own, whose actions are the transfers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import Journey, journeys_of, waited_departures
from autosplit.pipeline.schedule.routes import Parcel
from autosplit.pipeline.schedule.schedule import Schedule

from .activation_memory import StageMemory, moved_bytes
from .rank_time import time_of_rank
from .step_graph import Message, StepGraph
from .transfer import FREE_MOVES, MoveCosts, Transfer


@dataclass
class Lanes:
    """The transfers of a step, as rows of further actions of its graph.

    Attributes:
        rows: per lane, the numbers of its transfers in order.
        took: per transfer, the seconds for which it keeps its lane.
        latency: per transfer, the seconds from then until all is there.
        spent: per action of a rank, the seconds that moves take of the rank then.
        ends: of every move of a rank, its rank, its action and its transfer.
    """

    rows: list[list[int]] = field(default_factory=list)
    took: dict[int, float] = field(default_factory=dict)
    latency: dict[int, float] = field(default_factory=dict)
    spent: dict[int, float] = field(default_factory=dict)
    ends: list[tuple[int, Action, int]] = field(default_factory=list)

    def spans(self, starts: Sequence[float]) -> Iterator[tuple[int, Action, float, float]]:
        """Rank, action, start and end of every move, from when each transfer started."""
        for rank, action, number in self.ends:
            end = starts[number] + self.took[number]
            arrives = action.kind in (ActionKind.ACCEPT, ActionKind.LOAD, ActionKind.RELOAD)
            yield rank, action, starts[number], end + arrives * self.latency[number]


Way = Callable[[Journey, bool], tuple[float, float]]
"""Of a journey, out or back, the seconds for which it keeps its lane, and then to its arrival."""


def free_way(journey: Journey, out: bool) -> tuple[float, float]:
    """Transfers that take no time."""
    return 0.0, 0.0


def ways(schedule: Schedule, transfer: Transfer, memory: Sequence[StageMemory] | None) -> Way:
    """The seconds of every transfer.

    Raises:
        ScheduleError: later, where a link has a bandwidth and what travels is not known.
    """

    def way(journey: Journey, out: bool) -> tuple[float, float]:
        link = transfer.host or Link()
        if journey.partner is not None:
            link = transfer.link(journey.rank, journey.partner)
        if math.isinf(link.bandwidth):
            return 0.0, link.latency
        if memory is None:
            raise ScheduleError(
                f"schedule {schedule.name!r} moves what stage {journey.stage} holds of microbatch "
                f"{journey.microbatch}, and the link has a bandwidth: give the memory of every "
                "stage"
            )
        size = moved_bytes(
            schedule.moved, journey.stage, memory[journey.stage], deferred=journey.deferred
        )
        return size / link.bandwidth, link.latency

    return way


def add_lanes(
    graph: StepGraph,
    schedule: Schedule,
    rows: Sequence[Sequence[int]],
    way: Way,
    journeys: Sequence[Journey] | None = None,
    costs: MoveCosts = FREE_MOVES,
) -> Lanes:
    """Add the transfers of a schedule to its own step graph, with all that waits for them.

    Args:
        graph: of the schedule; gets further actions.
        schedule: whose moves.
        rows: per rank, the numbers of its actions.
        way: the seconds of each transfer.
        journeys: those of the schedule, where they are known.
        costs: what moves take of ranks.
    """
    journeys = journeys_of(schedule) if journeys is None else journeys
    if not journeys:
        return Lanes()
    builder = _Builder(graph, len(schedule.ranks))
    for journey in journeys:
        builder.add(journey, rows, way)
    builder.close(schedule, rows)
    builder.lanes.spent = _spent(schedule, rows, way, journeys, costs)
    return builder.lanes


def _spent(
    schedule: Schedule,
    rows: Sequence[Sequence[int]],
    way: Way,
    journeys: Sequence[Journey],
    costs: MoveCosts,
) -> dict[int, float]:
    """Seconds that moves take of ranks, by the number of an action."""
    if costs == FREE_MOVES:
        return {}
    times = [time_of_rank(row, costs) for row in schedule.ranks]
    spent = {
        rows[rank][place]: seconds
        for rank, time in enumerate(times)
        for place, seconds in time.own.items()
    }
    for journey in journeys:
        ends = [(journey.rank, journey.leaves, True), (journey.rank, journey.comes, False)]
        if journey.partner is not None:
            ends.append((journey.partner, journey.accepted, True))
            ends.append((journey.partner, journey.returned, False))
        for rank, place, out in ends:
            if place in times[rank].beside:
                number = rows[rank][place]
                lost = costs.slowing * way(journey, out)[0]
                spent[number] = spent.get(number, 0.0) + lost
    return spent


class _Builder:
    def __init__(self, graph: StepGraph, ranks: int) -> None:
        self.lanes = Lanes()
        self._graph = graph
        self._ranks = ranks
        self._numbers: dict[tuple[int, int | str], int] = {}
        self._queues: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._leaving: dict[tuple[int, int], int] = {}
        """By rank and place, the transfer of a departure."""
        self._parcels: dict[tuple[int, int, float], int] = {}
        """By an action and the row that waits for it, and for how long after it."""
        self._starting: dict[tuple[int, int], int] = {}
        """By rank and place, the transfer of an arrival."""

    def add(self, journey: Journey, rows: Sequence[Sequence[int]], way: Way) -> None:
        """The two transfers of a journey, and who starts and awaits them."""
        owner, partner = journey.rank, journey.partner
        row = rows[owner]
        leave, come, use = (row[each] for each in (journey.leaves, journey.comes, journey.used))
        if partner is None:
            out = self._transfer(leave, (owner, "out"), journey.leaves, way(journey, True))
            back = self._transfer(come, (owner, "in"), journey.comes, way(journey, False))
        else:
            take, give = rows[partner][journey.accepted], rows[partner][journey.returned]
            out = self._transfer(leave, (owner, partner), journey.leaves, way(journey, True))
            back = self._transfer(give, (partner, owner), journey.returned, way(journey, False))
            self._edge(take, out)
            self._edge(come, back)
            self._ends(partner, take, out)
            self._ends(partner, give, back)
            self._leaving[partner, journey.returned] = back
            self._starting[partner, journey.accepted] = out
        self._ends(owner, leave, out)
        self._ends(owner, come, back)
        self._leaving[owner, journey.leaves] = out
        self._starting[owner, journey.comes] = back
        self._edge(out, back, self.lanes.latency[out])
        self._edge(back, use, self.lanes.latency[back])

    def close(self, schedule: Schedule, rows: Sequence[Sequence[int]]) -> None:
        """Put the lanes in order, and let ranks wait for what has to have left."""
        self.lanes.rows = [
            [number for _, number in sorted(self._queues[lane])] for lane in sorted(self._queues)
        ]
        # What one transfer of a lane waits for, those behind it need not.
        told: set[tuple[int, int]] = set()
        for rank, row in enumerate(schedule.ranks):
            for place, departures in waited_departures(row):
                number = rows[rank][place]
                if row[place].kind.is_move:
                    found = self._starting.get((rank, place))
                    if found is None:
                        continue
                    number = found
                for each in departures:
                    departure = self._leaving.get((rank, each))
                    if departure is None or (self._graph.ranks[number], departure) in told:
                        continue
                    told.add((self._graph.ranks[number], departure))
                    self._edge(departure, number)

    def _transfer(
        self, starter: int, lane: tuple[int, int | str], place: int, took: tuple[float, float]
    ) -> int:
        graph, row = self._graph, self._numbers.setdefault(lane, len(self._numbers))
        number = graph.add(self._ranks + row, graph.actions[starter])
        self._queues[row].append((place, number))
        self.lanes.took[number], self.lanes.latency[number] = took
        self._edge(starter, number)
        return number

    def _ends(self, rank: int, move: int, transfer: int) -> None:
        self.lanes.ends.append((rank, self._graph.actions[move], transfer))

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
