"""List the operations that each rank's host enqueues in a step, under autosplit's engine and
torch's runtime.

The ranks of one pipeline stand for the whole mesh. Ranks that differ only along other dimensions
enqueue the same operations, and their collectives meet at one place of the program. Map every rank
of the mesh to the rank at its place in the pipeline. Each edge of the mesh's graph (see
``communicators``) maps to an edge of the pipeline's graph, so a cycle of the mesh's graph gives a
cycle of the pipeline's graph. Conversely, each edge of the pipeline's graph exists in the mesh's
graph, and so does each cycle.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from autosplit.errors import ScheduleError
from autosplit.mesh.dimensions import CONTEXT, EXPERT, EXPERT_SHARD, SHARD, TENSOR
from autosplit.pipeline.schedule.gathers import add_gathers
from autosplit.pipeline.schedule.moves import waited_departures
from autosplit.pipeline.schedule.routes import (
    StageDataflow,
    incoming_messages,
    outgoing_messages,
    result_of,
    sender_and_receiver,
)
from autosplit.pipeline.schedule.schedule import (
    BACKWARDS,
    DEPARTURES,
    LANES,
    SHARDING,
    Action,
    ActionKind,
    Schedule,
)
from autosplit.pipeline.simulation.prepared import PreparedSchedule

from .communicators import COMPUTE, HOST, RECEIVE, SEND, Operation, Part, Programs

COMMUNICATORS = {
    "pair": "{low}:{high}",
    "group": "pp",
    "direction": "all {way}",
    "edge": "{source} to {target}",
}
"""Which messages share a communicator, and its name. ``pair``: those between two ranks, as torch's
unbatched messages do. ``group``: all, as torch's batched messages and groups bound to a device do.
``direction``: all outputs, and all gradients. ``edge``: those of each way between two ranks, as in
this engine. All communicators are created before a step.
"""


_PEERS = {
    ActionKind.SEND_F: 1,
    ActionKind.RECV_F: -1,
    ActionKind.SEND_B: -1,
    ActionKind.RECV_B: 1,
}
"""Offset from a message's stage to the stage at its other end."""

_RECEIVES = {
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
    """Records the operations that one rank's host enqueues, action by action.

    As with torch's groups over NCCL, a communication starts after all work that was enqueued on the
    compute stream before it. The compute stream waits for the communication; the host does not.

    Args:
        rank: a rank of the pipeline.
        placement: the rank of each stage.
        communicators: one of ``COMMUNICATORS``.
        dimensions: the mesh dimensions with several ranks.

    Attributes:
        operations: the enqueued operations, in order.
        sent: maps (communicator, target) to the enqueued sends, in order.
        received: maps (communicator, source) to the enqueued receives, in order.
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
        self._exchanges = [
            dimension for dimension in dimensions if dimension in (TENSOR, EXPERT, CONTEXT)
        ]
        self._name = COMMUNICATORS[communicators]
        self._posted: dict[Action, int] = {}  # messages without a wait so far
        self._predecessors: list[int] = []  # the last computation, and the waits after it

    def enqueue_operation(
        self, text: str, queue: str, parts: Iterable[Part], after: Iterable[int] = ()
    ) -> int:
        """Enqueue an operation that waits for the last computation and for the operations at the
        places ``after``. Return the place of the new operation.
        """
        parts = tuple(parts)
        queues = dict.fromkeys((queue, *(part.communicator for part in parts)))
        self.operations.append(Operation(text, (*queues,), parts, (*self._predecessors, *after)))
        return len(self.operations) - 1

    def hold(self, text: str, places: Iterable[int], members: Iterable[int] = ()) -> None:
        """Make the host wait until the operations at these places have ended. With ``members``, it
        also waits until the hosts of these ranks make the same call.
        """
        parts = (Part("hosts", text, tuple(members)),) if members else ()
        self.operations.append(Operation(text, (HOST,), parts, tuple(places)))

    def settle(self) -> None:
        """Hold the host until the compute stream has ended all operations."""
        self._predecessors += self._posted.values()
        self.hold("settled", self._predecessors)

    def enqueue(self, action: Action) -> None:
        """Enqueue an action: a message, a wait, a computation, a gather or a reduction."""
        kind = action.kind
        if kind.is_message:
            self._message(action)
        elif kind in _SENDS:
            self._wait(replace(action, kind=_SENDS[kind]))
        elif kind is ActionKind.UNSHARD:
            shards = _shards(self._dimensions)
            self.add_computation(str(action), *(f"{shard} gathers" for shard in shards))
        elif kind is ActionKind.REDUCE_GRAD:
            self.add_computation(
                str(action), *(dimension for dimension in self._dimensions if dimension != TENSOR)
            )
        elif not kind.is_whole:
            if kind in _RECEIVES:
                self._wait(replace(action, kind=_RECEIVES[kind]))
            self.add_computation(str(action), *self._exchanges)

    def add_computation(self, text: str, *dimensions: str) -> None:
        """Enqueue a computation called ``text``, with a collective along each mesh dimension."""
        parts = [
            Part(f"{dimension} of rank {self._rank}", text, (self._rank,))
            for dimension in dimensions
        ]
        self._predecessors = [self.enqueue_operation(text, COMPUTE, parts)]

    def _wait(self, message: Action) -> None:
        if message in self._posted:
            self._predecessors.append(self._posted.pop(message))

    def _message(self, action: Action) -> None:
        sends = action.kind in _SENDS.values()
        peer = self._placement[action.stage + _PEERS[action.kind]]
        source, target = (self._rank, peer) if sends else (peer, self._rank)
        low, high = sorted((source, target))
        way = action.kind.value[-1]
        name = self._name.format(source=source, target=target, low=low, high=high, way=way)
        part = Part(name, SEND if sends else RECEIVE, (peer,))
        self._posted[action] = self.enqueue_operation(str(action), name, [part])
        (self.sent if sends else self.received)[name, peer].append(action)


def torch_programs(
    rows: Sequence[Sequence[Action]],
    placement: Sequence[int],
    communicators: str = "pair",
    dimensions: Collection[str] = (),
) -> Programs:
    """The operations that torch's ``_PipelineScheduleRuntime`` enqueues.

    Messages are enqueued where they are listed. The wait for a receive is before the action that
    uses it; the wait for a send is where it is listed, or at the end of the step.

    Args:
        rows: per rank, its actions with sends, receives, and waits for sends if there are any.
        placement: the rank of each stage.
        communicators: one of ``COMMUNICATORS``.
        dimensions: the mesh dimensions with several ranks.

    Raises:
        ScheduleError: a receive would get a wrong message, because NCCL matches messages by their
            order.
    """
    hosts = [Host(rank, placement, communicators, dimensions) for rank in range(len(rows))]
    for host, row in zip(hosts, rows, strict=True):
        for action in row:
            host.enqueue(action)
        host.settle()
    _check_order(hosts)
    return {rank: host.operations for rank, host in enumerate(hosts)}


def _check_order(hosts: Sequence[Host]) -> None:
    """Check that every receive gets the right message. ``find_deadlock`` finds receives whose
    message never comes.
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
                        f"{receive}: NCCL matches messages by order, so list both in one order"
                    )


def _arrives(send: Action) -> Action:
    """The receive that matches a send."""
    kind = ActionKind.RECV_F if send.kind is ActionKind.SEND_F else ActionKind.RECV_B
    return replace(send, kind=kind, stage=send.stage + _PEERS[send.kind])


# --- this engine ----------------------------------------------------------------------------------


def engine_programs(schedule: Schedule, dimensions: Collection[str] = ()) -> Programs:
    """The operations that ``PipelineTrainer`` enqueues in a step over GPUs.

    Args:
        schedule: a legal schedule.
        dimensions: the mesh dimensions with several ranks.
    """
    schedule = add_gathers(schedule, range(schedule.stages) if _shards(dimensions) else ())
    prepared = PreparedSchedule(schedule, StageDataflow(schedule.stages))
    ranks = range(len(schedule.ranks))
    return {rank: _EngineRank(prepared, rank, dimensions).run() for rank in ranks}


def _shards(dimensions: Iterable[str]) -> list[str]:
    """The mesh dimensions along which parameters are sharded."""
    return [dimension for dimension in dimensions if dimension in (SHARD, EXPERT_SHARD)]


class _EngineRank(Host):
    """The operations of one rank, as executor, transport and moves enqueue them."""

    def __init__(
        self,
        prepared: PreparedSchedule,
        rank: int,
        dimensions: Collection[str],
    ) -> None:
        schedule = prepared.schedule
        super().__init__(rank, schedule.placement, "edge", dimensions)
        self._schedule, self._routes = schedule, prepared.routes[rank]
        self._is_sharded = bool(_shards(dimensions))
        self._posts = prepared.recv_posts[rank]
        receives = self._routes.receives
        self._receives = {peer: deque(messages) for peer, messages in receives.items()}
        self._retired = Counter[int]()
        self._moves: dict[int, int] = {}
        self._reductions: list[int] = []
        self._row = schedule.ranks[rank]
        self._last_weights = {a.stage: a for a in self._row if a.kind in BACKWARDS}
        self._has_replicas = not self._is_sharded and bool({*dimensions} - {TENSOR})
        self._needs = defaultdict(list, waited_departures(self._row))
        for move in prepared.moves:
            if move.rank == rank:
                self._needs[move.comes].append(move.leaves)
                self._needs[move.used].append(move.comes)
            if move.partner == rank:
                self._needs[move.returned].append(move.accepted)

    def run(self) -> list[Operation]:
        """The rank's operations of one step, in order."""
        everyone = range(len(self._schedule.ranks))
        self.hold("batch", (), everyone)
        for place, action in enumerate(self._row):
            over = [self._moves[need] for need in self._needs[place]]
            if action.kind.is_move:
                self._moves[place] = self._move(action, over)
                continue
            if over:
                self.hold(f"{action} waits", over)
            if action.kind.is_compute:
                self._act(action)
            elif self._is_sharded and action.kind in SHARDING:
                self.enqueue(action)
        self.hold("moves", self._moves.values())
        self.settle()
        self.hold("gradients", self._reductions)
        self.hold("losses", (), everyone)
        return self.operations

    def _act(self, action: Action) -> None:
        schedule, routes = self._schedule, self._routes
        for peer in self._posts[action]:
            self.enqueue(self._receives[peer].popleft().receive)
        for message in incoming_messages(action, routes.dataflow):
            sender, _ = sender_and_receiver(message, schedule)
            acked = routes.acked_sends.get(message, 0)
            for sent in routes.sends.get(sender, ())[self._retired[sender] : acked]:
                self._wait(sent.send)
                self._retired[sender] += 1
        reduces = self._has_replicas and self._last_weights.get(action.stage) == action
        if reduces:
            self.add_computation(f"{action} begins", *self._exchanges)
            self._reduce(f"{action} reduces")
        self.enqueue(action)
        if reduces:
            self._reduce(f"{action} reduces the rest")
        for message in outgoing_messages(result_of(action), routes.dataflow):
            if sender_and_receiver(message, schedule)[1] != self._rank:
                self.enqueue(message.send)

    def _reduce(self, text: str) -> None:
        """Enqueue reductions of gradients. The rank first waits for the reductions at the end of
        its row.
        """
        name = f"gradients of rank {self._rank}"
        part = Part(name, text, (self._rank,))
        self._reductions.append(self.enqueue_operation(text, name, [part]))

    def _move(self, action: Action, over: Sequence[int]) -> int:
        """Enqueue a move in its lane. The lane's thread waits for the operations in ``over``."""
        kind, mine = action.kind, self._rank
        parts: list[Part] = []
        if kind.is_shared:
            partner, leaves = self._schedule.partner(mine), kind in DEPARTURES
            ends = (mine, partner) if leaves else (partner, mine)
            name = "memory {} to {}".format(*ends)
            parts = [Part(name, SEND if leaves else RECEIVE, (partner,))]
        return self.enqueue_operation(str(action), LANES[kind], parts, over)
