"""What the host of each rank enqueues in a step: under this engine, and under torch's runtime.

Ranks of one pipeline stand for all: those that differ only in their places along the other
dimensions of a mesh enqueue the same, and what they do together meets at one place of it. Take the
graph of a whole mesh (see ``communicators``), and every rank for the one at its place in the
pipeline: each need there is one here, so that a circle there goes round one here; and each need
here is there between ranks of one share of the mesh, so that a circle here is one there as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from autosplit.errors import ScheduleError
from autosplit.mesh.dimensions import CONTEXT, EXPERT, EXPERT_SHARD, SHARD, TENSOR
from autosplit.pipeline.schedule.moves import Journey, journeys_of, waited_departures
from autosplit.pipeline.schedule.routes import (
    Feeds,
    Routes,
    ends_of,
    parcels_for,
    parcels_of,
    result_of,
    routes_of,
)
from autosplit.pipeline.schedule.schedule import DEPARTURES, LANES, Action, ActionKind, Schedule
from autosplit.pipeline.simulation.playing import posts_of

from .communicators import COMPUTE, HOST, RECEIVE, SEND, Operation, Part, Programs

COMMUNICATORS = {
    "pair": "{low}:{high}",
    "group": "pp",
    "direction": "all {way}",
    "edge": "{source} to {target}",
}
"""What messages have a communicator for, and its name: two ranks, as unbatched ones of torch have;
all, as its batched ones have, and those of a group that is bound to a device; outputs and
gradients; or each way between two ranks, as this engine has it. All are made before a step.
"""


_PEERS = {
    ActionKind.SEND_F: 1,
    ActionKind.RECV_F: -1,
    ActionKind.SEND_B: -1,
    ActionKind.RECV_B: 1,
}
"""How many stages further the other end of a message is."""

_TAKES = {
    ActionKind.FORWARD: ActionKind.RECV_F,
    ActionKind.BACKWARD_INPUT: ActionKind.RECV_B,
    ActionKind.BACKWARD: ActionKind.RECV_B,
}
"""What an action waits for, if it was received."""
_SENDS = {
    ActionKind.WAIT_SEND_F: ActionKind.SEND_F,
    ActionKind.WAIT_SEND_B: ActionKind.SEND_B,
}


class Host:
    """Puts down what one rank's host enqueues, action by action.

    As with torch's groups over NCCL, what communicates starts behind all that the stream that
    computes was given before; and a wait for it is that stream's, not the host's.

    Args:
        rank: of the pipeline.
        placement: the rank of each stage.
        communicators: one of ``COMMUNICATORS``.
        dimensions: of the mesh, those that have several ranks.

    Attributes:
        operations: what it has enqueued.
        sent: communicator and target -> the sends among that, in their order.
        received: communicator and source -> the receives, likewise.
    """

    def __init__(
        self,
        rank: int,
        placement: Sequence[int],
        communicators: str,
        dimensions: Collection[str],
    ) -> None:
        self.operations: list[Operation] = []
        self.sent: dict[tuple[str, int], list[Action]] = defaultdict(list)
        self.received: dict[tuple[str, int], list[Action]] = defaultdict(list)
        self._rank, self._placement, self._dimensions = rank, placement, dimensions
        self._exchanges = [each for each in dimensions if each in (TENSOR, EXPERT, CONTEXT)]
        self._name = COMMUNICATORS[communicators]
        self._posted: dict[Action, int] = {}  # messages that nothing has waited for
        self._before: list[int] = []  # the last that was computed, and what is waited for behind it

    def put(self, text: str, queue: str, parts: Iterable[Part], after: Iterable[int] = ()) -> int:
        """Enqueue something behind what was computed, and some places; gives its own."""
        parts = tuple(parts)
        queues = dict.fromkeys((queue, *(part.communicator for part in parts)))
        self.operations.append(Operation(text, (*queues,), parts, (*self._before, *after)))
        return len(self.operations) - 1

    def hold(self, what: str, places: Iterable[int], members: Iterable[int] = ()) -> None:
        """Hold the host until all at these places have ended, or until other hosts are there."""
        parts = (Part("hosts", what, tuple(members)),) if members else ()
        self.operations.append(Operation(what, (HOST,), parts, tuple(places)))

    def settle(self) -> None:
        """Hold the host until the stream that computes is done with all."""
        self._before += self._posted.values()
        self.hold("settled", self._before)

    def enqueue(self, action: Action) -> None:
        """A message, the wait for one, or something that is computed, gathered or reduced."""
        kind = action.kind
        if kind.is_message:
            self._message(action)
        elif kind in _SENDS:
            self._wait(replace(action, kind=_SENDS[kind]))
        elif kind is ActionKind.UNSHARD:
            shards = [each for each in self._dimensions if each in (SHARD, EXPERT_SHARD)]
            self.compute(str(action), *(f"{each} gathers" for each in shards))
        elif kind is ActionKind.REDUCE_GRAD:
            self.compute(str(action), *(each for each in self._dimensions if each != TENSOR))
        elif not kind.is_whole:
            if kind in _TAKES:
                self._wait(replace(action, kind=_TAKES[kind]))
            self.compute(str(action), *self._exchanges)

    def compute(self, text: str, *dimensions: str) -> None:
        """Enqueue something that is computed, with collectives along some dimensions."""
        parts = [Part(f"{each} of rank {self._rank}", text, (self._rank,)) for each in dimensions]
        self._before = [self.put(text, COMPUTE, parts)]

    def _wait(self, message: Action) -> None:
        if message in self._posted:
            self._before.append(self._posted.pop(message))

    def _message(self, action: Action) -> None:
        sends = action.kind in _SENDS.values()
        peer = self._placement[action.stage + _PEERS[action.kind]]
        source, target = (self._rank, peer) if sends else (peer, self._rank)
        low, high = sorted((source, target))
        way = action.kind.value[-1]
        name = self._name.format(source=source, target=target, low=low, high=high, way=way)
        part = Part(name, SEND if sends else RECEIVE, (peer,))
        self._posted[action] = self.put(str(action), name, [part])
        (self.sent if sends else self.received)[name, peer].append(action)


def of_torch(
    rows: Sequence[Sequence[Action]],
    placement: Sequence[int],
    communicators: str = "pair",
    dimensions: Collection[str] = (),
) -> Programs:
    """What torch's ``_PipelineScheduleRuntime`` enqueues: every message where it is listed, waits
    for a receive before the action that takes it, for sends at the end or where that is listed.

    Args:
        rows: per rank its actions, with sends and receives, and waits for sends if it has any.
        placement: the rank of each stage.
        communicators: one of ``COMMUNICATORS``.
        dimensions: of the mesh, those that have several ranks.

    Raises:
        ScheduleError: a receive would be given another message than its own, as NCCL matches them
            by their order.
    """
    hosts = [Host(rank, placement, communicators, dimensions) for rank in range(len(rows))]
    for host, row in zip(hosts, rows, strict=True):
        for action in row:
            host.enqueue(action)
        host.settle()
    _check_order(hosts)
    return {rank: host.operations for rank, host in enumerate(hosts)}


def _check_order(hosts: Sequence[Host]) -> None:
    """Every receive must be given its own message. One that never comes is found where all that is
    enqueued is played.
    """
    for rank, host in enumerate(hosts):
        for (name, target), sent in host.sent.items():
            received = hosts[target].received.get((name, rank), [])
            if {*map(_arrives, sent)} != {*received}:
                continue
            for send, receive in zip(sent, received, strict=False):
                if _arrives(send) != receive:
                    raise ScheduleError(
                        f"over {name!r} rank {rank} sends {send} where rank {target} receives "
                        f"{receive}: NCCL matches messages by their order"
                    )


def _arrives(send: Action) -> Action:
    """The receive of a message that is sent."""
    kind = ActionKind.RECV_F if send.kind is ActionKind.SEND_F else ActionKind.RECV_B
    return replace(send, kind=kind, stage=send.stage + _PEERS[send.kind])


# --- this engine ----------------------------------------------------------------------------------


def of_engine(schedule: Schedule, dimensions: Collection[str] = ()) -> Programs:
    """What ``PipelineTrainer`` enqueues in a step over GPUs.

    Args:
        schedule: a legal one.
        dimensions: of the mesh, those that have several ranks.
    """
    feeds = Feeds(schedule.stages)
    journeys = journeys_of(schedule)
    return {
        rank: _EngineRank(schedule, rank, routes, posts, journeys, dimensions).run()
        for rank, (routes, posts) in enumerate(
            zip(routes_of(schedule, feeds), posts_of(schedule, feeds), strict=True)
        )
    }


class _EngineRank(Host):
    """One rank, as executor, transport and moves have it."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        routes: Routes,
        posts: Mapping[Action, Sequence[int]],
        journeys: Iterable[Journey],
        dimensions: Collection[str],
    ) -> None:
        super().__init__(rank, schedule.placement, "edge", dimensions)
        self._schedule, self._routes, self._posts = schedule, routes, posts
        self._receives = {peer: deque(parcels) for peer, parcels in routes.receives.items()}
        self._retired = Counter[int]()
        self._moves: dict[int, int] = {}
        self._needs = defaultdict(list, waited_departures(schedule.ranks[rank]))
        for each in journeys:
            if each.rank == rank:
                self._needs[each.comes].append(each.leaves)
                self._needs[each.used].append(each.comes)
            if each.partner == rank:
                self._needs[each.returned].append(each.accepted)

    def run(self) -> list[Operation]:
        everyone = range(len(self._schedule.ranks))
        self.hold("batch", (), everyone)
        if {SHARD, EXPERT_SHARD}.intersection(self._dimensions):
            for stage in self._schedule.held(self._rank):
                self.enqueue(Action(stage, ActionKind.UNSHARD, 0))
        for place, action in enumerate(self._schedule.ranks[self._rank]):
            over = [self._moves[each] for each in self._needs[place]]
            if action.kind.is_move:
                self._moves[place] = self._move(action, over)
                continue
            if over:
                self.hold(f"{action} waits", over)
            if action.kind.is_compute:
                self._act(action)
        self.hold("moves", self._moves.values())
        self.settle()
        if {*self._dimensions} - {TENSOR}:  # means of replicas, in one order on all ranks
            for stage in sorted(self._schedule.held(self._rank), reverse=True):
                self.enqueue(Action(stage, ActionKind.REDUCE_GRAD, 0))
        self.settle()
        self.hold("losses", (), everyone)
        return self.operations

    def _act(self, action: Action) -> None:
        schedule, routes = self._schedule, self._routes
        for peer in self._posts[action]:
            self.enqueue(self._receives[peer].popleft().receive)
        for parcel in parcels_for(action, routes.feeds):
            peer, proven = ends_of(parcel, schedule)[0], routes.proven.get(parcel, 0)
            for each in routes.sends.get(peer, ())[self._retired[peer] : proven]:
                self._wait(each.send)
                self._retired[peer] += 1
        self.enqueue(action)
        for parcel in parcels_of(result_of(action), routes.feeds):
            if ends_of(parcel, schedule)[1] != self._rank:
                self.enqueue(parcel.send)

    def _move(self, action: Action, over: Sequence[int]) -> int:
        """A lane has a thread of its own, which waits for what is to be over."""
        kind, mine = action.kind, self._rank
        parts: list[Part] = []
        if kind.is_shared:
            partner, leaves = self._schedule.partner(mine), kind in DEPARTURES
            ends = (mine, partner) if leaves else (partner, mine)
            name = "memory {} to {}".format(*ends)
            parts = [Part(name, SEND if leaves else RECEIVE, (partner,))]
        return self.put(str(action), LANES[kind], parts, over)
