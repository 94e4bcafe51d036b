"""A step as a graph of numbered actions, with the messages between them, the links that these take,
and the moves of memory: who waits for what, and what a lane carries when.

A lane is what carries moves from one rank to its partner, or between a rank and its store on the
host, one after another, in the order of the sender's row. To the simulator's core it is a rank of
its own, whose actions are the transfers. Ranks lose no time to them: on an accelerator copy engines
carry them. On a CPU whose cores all compute, threads that copy take time from what is computed
beside.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.moves import Journey, journeys_of, waited_departures
from autosplit.pipeline.schedule.routes import Feeds, Parcel, needs_of, parcels_of, result_of
from autosplit.pipeline.schedule.schedule import ARRIVALS, Action, Schedule

from .activation_memory import StageMemory


@dataclass(frozen=True)
class Transfer:
    """Links between ranks: one in each direction, each carrying one message after the other.

    A message occupies its link for bytes / bandwidth and arrives ``latency`` after that. What moves
    between partners (see ``Schedule.partner``) goes over the same links, in turns of its own: it
    is not simulated that it slows messages down, or they it.

    Attributes:
        latency: seconds.
        bandwidth: bytes in a second.
        message_bytes: bytes of one microbatch's activations, and of their gradients: one number for
            all boundaries, or by the stage before the boundary.
        host: one link each way between every rank and its store on the host; None: they cost
            nothing.

    Raises:
        ScheduleError: a negative number, or no bandwidth.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    message_bytes: float | Mapping[int, float] = 0.0
    host: Link | None = None

    def __post_init__(self) -> None:
        for latency, bandwidth in (Link(self.latency, self.bandwidth), self.host or Link()):
            if not (math.isfinite(latency) and latency >= 0.0):
                raise ScheduleError(f"transfer must be finite seconds >= 0, got {latency!r}")
            if not bandwidth > 0.0:
                raise ScheduleError(f"bandwidth must be bytes in a second > 0, got {bandwidth!r}")
        sizes = self.message_bytes
        for size in sizes.values() if isinstance(sizes, Mapping) else [sizes]:
            if not (math.isfinite(size) and size >= 0.0):
                raise ScheduleError(f"message_bytes must be finite numbers >= 0, got {size!r}")

    def seconds(self, boundary: int) -> float:
        """For how long a message over the boundary after a stage keeps its link.

        Raises:
            ScheduleError: its bytes are not known.
        """
        sizes = self.message_bytes
        if not isinstance(sizes, Mapping):
            return sizes / self.bandwidth
        if boundary not in sizes:
            raise ScheduleError(
                f"no message_bytes for the boundary after stage {boundary}; known: {sorted(sizes)}"
            )
        return sizes[boundary] / self.bandwidth


INSTANT = Transfer()
"""Links that cost nothing."""


class Message(NamedTuple):
    """A parcel on its way from the action that makes it to one rank.

    Attributes:
        parcel: its number.
        link: the ranks at both ends; None if the parcel takes no time, as on its own rank.
        took: seconds for which it keeps the link.
        latency: seconds from then to its arrival.
    """

    parcel: int
    link: tuple[int, int] | None
    took: float
    latency: float


class StepGraph:
    """Actions on their ranks, numbered in order, and what each needs and makes, numbered as well.

    A parcel is a result on its way to one stage on one rank, which alone waits for it.

    Args:
        schedule: where stages lie; legal or not.
        placed: rank and action of every node; None: those of the schedule, rank by rank.
        feeds: who feeds whom; None: each stage the next.
        transfer: the links between ranks.

    Attributes:
        actions: by number.
        ranks: of every action, the rank that runs it.
        needs: of every action, the parcels that it takes.
        makes: of every action, the messages that it sends; of several actions that make the same,
            such as an I and a B, only the first to run sends it.
        parcels: by number.
        takers: of every parcel, the rank that waits for it.
        makers: of every parcel, the first action that makes it; -1 if none does.
    """

    def __init__(
        self,
        schedule: Schedule,
        placed: Iterable[tuple[int, Action]] | None = None,
        *,
        feeds: Feeds | None = None,
        transfer: Transfer = INSTANT,
    ) -> None:
        self._schedule = schedule
        self._feeds = feeds or Feeds(schedule.stages)
        self._transfer = transfer
        placed = list(_listed(schedule) if placed is None else placed)
        self.actions = [action for _, action in placed]
        self.ranks = [rank for rank, _ in placed]
        self.parcels: list[Parcel] = []
        self.takers: list[int] = []
        self.makers: list[int] = []
        self._of_result: dict[Action, list[int]] = defaultdict(list)
        self.needs = [
            tuple(
                [self._number(need, action.stage, rank) for need in needs_of(action, self._feeds)]
            )
            for rank, action in placed
        ]
        send = self._at_once if transfer == INSTANT else self._sent
        self.makes = [tuple(send(result_of(action), rank)) for rank, action in placed]
        for number, messages in enumerate(self.makes):
            for message in messages:
                if self.makers[message.parcel] < 0:
                    self.makers[message.parcel] = number

    def add(self, rank: int, action: Action) -> int:
        """One more action, which needs and makes nothing yet; its number."""
        number = len(self.actions)
        self.actions.append(action)
        self.ranks.append(rank)
        self.needs.append(())
        self.makes.append(())
        return number

    def _number(self, result: Action, stage: int, rank: int) -> int:
        """The number of a result on its way to a stage on a rank."""
        numbers = self._of_result[result]
        for number in numbers:
            if self.takers[number] == rank and self.parcels[number].stage == stage:
                return number
        numbers.append(len(self.parcels))
        self.parcels.append(Parcel(result, stage))
        self.takers.append(rank)
        self.makers.append(-1)
        return numbers[-1]

    def _at_once(self, result: Action, _: int) -> list[Message]:
        return [Message(number, None, 0.0, 0.0) for number in self._of_result.get(result, ())]

    def _sent(self, result: Action, rank: int) -> list[Message]:
        """The messages of a result, in the order in which links carry them."""
        messages: list[Message] = []
        for parcel in parcels_of(result, self._feeds):
            if not 0 <= parcel.stage < self._schedule.stages:  # of an action that does not exist
                continue
            home = self._schedule.placement[parcel.stage]
            if home == rank:
                continue
            took = self._transfer.seconds(parcel.boundary)
            number = self._number(result, parcel.stage, home)
            messages.append(Message(number, (rank, home), took, self._transfer.latency))
        travelling = {message.parcel for message in messages}
        for number in self._of_result.get(result, ()):
            if number not in travelling:
                messages.append(Message(number, None, 0.0, 0.0))
        return messages


def _listed(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    for rank, row in enumerate(schedule.ranks):
        yield from ((rank, action) for action in row)


# --- moves of memory ------------------------------------------------------------------------------


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
