"""A step as a graph of numbered actions, with its messages, the links that carry them, and moves.

A lane carries moves from one rank to its partner, or between a rank and the host. It carries one
move after another, in the order of the sender's row. For the simulator's core, a lane is another
rank, whose actions are the transfers. Transfers take no time from ranks: on an accelerator, copy
engines carry them. On a CPU whose cores all compute, the copying threads do slow computation down,
which is not simulated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.moves import ActivationMove, find_moves, waited_departures
from autosplit.pipeline.schedule.routes import (
    StageDataflow,
    StageMessage,
    needs_of,
    outgoing_messages,
    result_of,
)
from autosplit.pipeline.schedule.schedule import ARRIVALS, Action, Schedule

from .activation_memory import StageMemory


@dataclass(frozen=True)
class Transfer:
    """The speed of links between ranks. There is one link in each direction, which carries one
    message after another.

    A message occupies its link for bytes / bandwidth seconds and arrives ``latency`` seconds after
    that. Moves between partners (see ``Schedule.partner``) use links with the same figures. The
    simulation ignores that moves and messages slow each other down.

    Attributes:
        latency: latency of a link, in seconds.
        bandwidth: bandwidth of a link, in bytes per second.
        message_bytes: bytes of one microbatch's activations, and of their gradients: one number for
            all boundaries, or a mapping from the stage before each boundary.
        host: the link in each direction between a rank and the host; None: transfers to the host
            take no time.

    Raises:
        ScheduleError: a negative number, or a bandwidth of 0.
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
                raise ScheduleError(f"bandwidth must be > 0 bytes per second, got {bandwidth!r}")
        sizes = self.message_bytes
        for size in sizes.values() if isinstance(sizes, Mapping) else [sizes]:
            if not (math.isfinite(size) and size >= 0.0):
                raise ScheduleError(f"message_bytes must be finite numbers >= 0, got {size!r}")

    def message_seconds(self, boundary: int) -> float:
        """Seconds for which a message over the boundary after a stage occupies its link.

        Raises:
            ScheduleError: the bytes of messages over this boundary are not known.
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
    """The transfer of a numbered stage message to one rank.

    Attributes:
        number: the number of the stage message.
        link: (sending rank, receiving rank); None within a rank, where a message takes no time.
        took: seconds for which the message occupies the link.
        latency: seconds from the end of that time to the arrival.
    """

    number: int
    link: tuple[int, int] | None
    took: float
    latency: float


class StepGraph:
    """Numbered actions of all ranks, and the numbered stage messages that they need and send.

    Args:
        schedule: gives the placement of stages; legal or not.
        placed: (rank, action) of every node; None: the actions of the schedule, rank by rank.
        dataflow: the dataflow between stages; None: a chain.
        transfer: the links between ranks.

    Attributes:
        actions: the actions, by number.
        ranks: for every action, the rank that runs it.
        needs: for every action, the messages that it waits for.
        makes: for every action, the messages that it sends. If several actions compute the same
            result, such as an I and a B, only the first to run sends it.
        stage_messages: the stage messages by number.
        takers: for every stage message, the rank that waits for it.
        makers: for every stage message, the first action that computes it; -1 if none does.
    """

    def __init__(
        self,
        schedule: Schedule,
        placed: Iterable[tuple[int, Action]] | None = None,
        *,
        dataflow: StageDataflow | None = None,
        transfer: Transfer = INSTANT,
    ) -> None:
        self._schedule = schedule
        self._dataflow = dataflow or StageDataflow(schedule.stages)
        self._transfer = transfer
        placed = list(_listed(schedule) if placed is None else placed)
        self.actions = [action for _, action in placed]
        self.ranks = [rank for rank, _ in placed]
        self.stage_messages: list[StageMessage] = []
        self.takers: list[int] = []
        self.makers: list[int] = []
        self._of_result: dict[Action, list[int]] = defaultdict(list)
        self._waits: dict[tuple[int, int, float], int] = {}
        """The wait for an action, by the action, the row that waits, and the latency."""
        self.needs = [
            tuple(
                [
                    self._number(need, action.stage, rank)
                    for need in needs_of(action, self._dataflow)
                ]
            )
            for rank, action in placed
        ]
        send = self._at_once if transfer == INSTANT else self._sent
        self.makes = [tuple(send(result_of(action), rank)) for rank, action in placed]
        for number, messages in enumerate(self.makes):
            for message in messages:
                if self.makers[message.number] < 0:
                    self.makers[message.number] = number

    def add_action(self, rank: int, action: Action) -> int:
        """Add an action without needs and messages; return its number."""
        number = len(self.actions)
        self.actions.append(action)
        self.ranks.append(rank)
        self.needs.append(())
        self.makes.append(())
        return number

    def add_wait(self, maker: int, taker: int, latency: float = 0.0) -> None:
        """Let ``taker`` start no earlier than ``latency`` seconds after the end of ``maker``. With
        a negative ``latency``, it may start before that end.
        """
        existing = self._waits.get((maker, self.ranks[taker], latency))
        if existing is not None:
            self.needs[taker] += (existing,)
            return
        number = len(self.stage_messages)
        self._waits[maker, self.ranks[taker], latency] = number
        self.stage_messages.append(StageMessage(self.actions[maker], self.actions[taker].stage))
        self.takers.append(self.ranks[taker])
        self.makers.append(maker)
        self.needs[taker] += (number,)
        # A link of its own, so that this latency delays no other message.
        link = (-1 - number, -1 - number) if latency else None
        self.makes[maker] += (Message(number, link, 0.0, latency),)

    def _number(self, result: Action, stage: int, rank: int) -> int:
        """The number of the message that carries a result to a stage on a rank; a new number if no
        such message exists.
        """
        numbers = self._of_result[result]
        for number in numbers:
            if self.takers[number] == rank and self.stage_messages[number].stage == stage:
                return number
        numbers.append(len(self.stage_messages))
        self.stage_messages.append(StageMessage(result, stage))
        self.takers.append(rank)
        self.makers.append(-1)
        return numbers[-1]

    def _at_once(self, result: Action, _: int) -> list[Message]:
        return [Message(number, None, 0.0, 0.0) for number in self._of_result.get(result, ())]

    def _sent(self, result: Action, rank: int) -> list[Message]:
        """The messages of a result, in the order in which links carry them."""
        messages: list[Message] = []
        for stage_message in outgoing_messages(result, self._dataflow):
            if not 0 <= stage_message.stage < self._schedule.stages:  # of an illegal action
                continue
            home = self._schedule.placement[stage_message.stage]
            if home == rank:
                continue
            took = self._transfer.message_seconds(stage_message.boundary)
            number = self._number(result, stage_message.stage, home)
            messages.append(Message(number, (rank, home), took, self._transfer.latency))
        travelling = {message.number for message in messages}
        for number in self._of_result.get(result, ()):
            if number not in travelling:
                messages.append(Message(number, None, 0.0, 0.0))
        return messages


def _listed(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    for rank, row in enumerate(schedule.ranks):
        yield from ((rank, action) for action in row)


# --- lanes ----------------------------------------------------------------------------------------


class Lanes:
    """The rows of a step's ranks, and beside them lanes of transfers, which are added to its graph
    as actions.

    Args:
        graph: the graph of a schedule; gets the transfers.
        rows: per rank, the numbers of its actions.
        seconds: the duration of each action; gets the durations of the transfers.

    Attributes:
        graph: as passed.
        seconds: as passed.
        ranks: the number of ranks.
        rows: per rank, the numbers of its actions; then per lane, the numbers of its transfers, in
            order.
        ends: (rank, action, transfer, seconds from the transfer's end to the action's) of every
            action at which a transfer leaves or reaches a rank.
    """

    def __init__(
        self, graph: StepGraph, rows: Sequence[Sequence[int]], seconds: list[float]
    ) -> None:
        self.graph, self.seconds, self.ranks = graph, seconds, len(rows)
        self.rows = [*rows]
        self.ends: list[tuple[int, Action, int, float]] = []
        self._queues: dict[tuple[int, int | str], list[tuple[int, int]]] = {}
        """The transfers of each lane of moves, each with the place of the move that starts it."""
        self._transfers: dict[tuple[int, int], int] = {}
        """The transfer of a move, by rank and place."""

    def spans(self, starts: Sequence[float]) -> Iterator[tuple[int, Action, float, float]]:
        """Yield (rank, action, start, end) of every transfer. ``starts`` are the starts of the
        graph's actions, in seconds.
        """
        for rank, action, number, latency in self.ends:
            yield rank, action, starts[number], starts[number] + self.seconds[number] + latency

    def add_move(self, move: ActivationMove, seconds: float, latency: float) -> None:
        """Add the two transfers of a move, with the actions that start and await them.

        Args:
            move: the move.
            seconds: the time for which each transfer occupies its lane.
            latency: seconds from the end of that time to the arrival.
        """
        owner, partner, graph = move.rank, move.partner, self.graph
        ends = [(owner, move.leaves), (owner, move.comes)]
        if partner is None:
            outward = self._add_transfer((owner, "out"), owner, move.leaves, seconds)
            homeward = self._add_transfer((owner, "in"), owner, move.comes, seconds)
        else:
            outward = self._add_transfer((owner, partner), owner, move.leaves, seconds)
            homeward = self._add_transfer((partner, owner), partner, move.returned, seconds)
            ends += [(partner, move.accepted), (partner, move.returned)]
        for (rank, place), transfer in zip(ends, (outward, homeward) * 2, strict=False):
            number = self.rows[rank][place]
            action = graph.actions[number]
            graph.add_wait(number, transfer)
            arrives = action.kind in ARRIVALS
            self.ends.append((rank, action, transfer, latency if arrives else 0.0))
            self._transfers[rank, place] = transfer
        graph.add_wait(outward, homeward, latency)
        graph.add_wait(homeward, self.rows[owner][move.used], latency)

    def order_moves(self, schedule: Schedule) -> None:
        """Order the lanes of moves, and add the waits for departures."""
        self.rows += [[number for _, number in sorted(q)] for q in self._queues.values()]
        # Later transfers of a lane need not wait again for what an earlier one waited for.
        waited: set[tuple[int, int]] = set()
        for rank, row in enumerate(schedule.ranks):
            for place, departures in waited_departures(row):
                waiting: int | None = self.rows[rank][place]
                if row[place].kind.is_move:
                    waiting = self._transfers.get((rank, place))
                for position in departures:
                    departure = self._transfers.get((rank, position))
                    if waiting is None or departure is None:
                        continue
                    if (self.graph.ranks[waiting], departure) not in waited:
                        waited.add((self.graph.ranks[waiting], departure))
                        self.graph.add_wait(departure, waiting)

    def _add_transfer(
        self, lane: tuple[int, int | str], rank: int, place: int, seconds: float
    ) -> int:
        queue = self._queues.setdefault(lane, [])
        row = self.ranks + [*self._queues].index(lane)
        number = self.graph.add_action(row, self.graph.actions[self.rows[rank][place]])
        queue.append((place, number))
        self.seconds.append(seconds)
        return number


def add_lanes(
    graph: StepGraph,
    schedule: Schedule,
    rows: Sequence[Sequence[int]],
    seconds: list[float],
    transfer: Transfer = INSTANT,
    memory: Sequence[StageMemory] | None = None,
) -> Lanes:
    """Add the transfers of a schedule's moves to its step graph, with the waits for them.

    Args:
        graph: the graph of the schedule; transfers are added to it as actions.
        schedule: the schedule.
        rows: per rank, the numbers of its actions.
        seconds: the duration of each action; the durations of transfers are appended.
        transfer: the speed of the links.
        memory: per stage, the memory of a microbatch.

    Raises:
        ScheduleError: a link has a bandwidth, but the bytes of a move are missing.
    """
    lanes, moves = Lanes(graph, rows, seconds), find_moves(schedule)
    for move in moves:
        lanes.add_move(move, *_took(schedule, transfer, memory, move))
    if moves:
        lanes.order_moves(schedule)
    return lanes


def _took(
    schedule: Schedule,
    transfer: Transfer,
    memory: Sequence[StageMemory] | None,
    move: ActivationMove,
) -> tuple[float, float]:
    """(seconds for which each transfer of a move occupies its lane, seconds of latency until it
    arrives).
    """
    link = transfer.host or Link()
    if move.partner is not None:
        link = Link(transfer.latency, transfer.bandwidth)
    if math.isinf(link.bandwidth):
        return 0.0, link.latency
    if memory is None:
        raise ScheduleError(
            f"schedule {schedule.name!r} moves activations of stage {move.stage} and "
            f"microbatch {move.microbatch} over a link with a bandwidth, so their bytes are "
            "needed: pass the memory of every stage"
        )
    size = memory[move.stage].moved(deferred=move.deferred)
    return size / link.bandwidth, link.latency
