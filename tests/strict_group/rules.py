"""The rules that NCCL holds communication to, as a machine of states without threads or clocks.

- Each rank has a queue for each communicator, and only what stands first in it runs. Queues of
  different communicators do not hold each other up, as their kernels are on streams of their own.
- A send is over only with its receive: both must stand first at once.
- A collective begins when all members' are there, each first in its queue.
- Operations that were coalesced stand in the queue as one, and run together.
- Where kernels share one hardware connection, they are launched in the order in which the host
  enqueued them: one whose queue is not free yet holds what comes behind it, in other queues too.
- A communicator is made by its first use, which holds the host until all members are there, unless
  it was made eagerly.

Whoever drives it says when an operation that has met its partners is over. ``stuck`` finds what
will never be, whatever the times are. It imports nothing: the referee is a small process.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

SEND, RECEIVE = "send", "receive"
MESSAGES = (SEND, RECEIVE)


def pair_of(group: str, pair: Sequence[int]) -> str:
    """The communicator of two ranks of a group, for messages that are not coalesced."""
    return f"{group}/{':'.join(map(str, pair))}"


def group_of(communicator: str) -> str:
    """The group that a communicator is one of."""
    return communicator.partition("/")[0]


class Operation:
    """An operation that one rank enqueued on one communicator.

    Attributes:
        rank: whose it is.
        communicator: where it runs.
        kind: ``"send"``, ``"receive"`` or the name of a collective.
        peers: the partner of a message; all members of a collective.
        size: bytes, which partners agree on; of collectives anything that tells different ones
            apart.
        index: its place among the rank's operations on this communicator.
        entry: what it stands in the queue with; its own list where it was not coalesced.
        meeting: it and its partners, once they have met.
        over: whether it has ended.
    """

    __slots__ = (
        "communicator",
        "entry",
        "index",
        "kind",
        "meeting",
        "over",
        "peers",
        "rank",
        "size",
    )

    def __init__(
        self, rank: int, communicator: str, kind: str, peers: Sequence[int], size: object = None
    ) -> None:
        self.rank, self.communicator, self.kind = rank, communicator, kind
        self.peers, self.size = tuple(peers), size
        self.index = -1
        self.entry: list[Operation] = []
        self.meeting: tuple[Operation, ...] = ()
        self.over = False

    def __str__(self) -> str:
        if self.kind in MESSAGES:
            way = "to" if self.kind == SEND else "from"
            return f"{self.kind} {way} {self.peers[0]} (#{self.index} of {self.communicator!r})"
        return f"{self.kind} (#{self.index} of {self.communicator!r})"

    @property
    def channel(self) -> tuple[str, int, int]:
        """The ordered queue of operations that it may meet: messages of a pair by direction, or
        the collectives of the members.
        """
        if self.kind == SEND:
            return SEND, self.rank, self.peers[0]
        if self.kind == RECEIVE:
            return SEND, self.peers[0], self.rank
        return "", -1, -1


class Making:
    """A communicator to be made, for which the hosts of its members are held.

    Attributes:
        communicator: its name.
        members: its ranks.
        here: those that have come.
    """

    def __init__(self, communicator: str, members: Sequence[int]) -> None:
        self.communicator, self.members = communicator, tuple(members)
        self.here: set[int] = set()

    @property
    def over(self) -> bool:
        """Whether all have come."""
        return len(self.here) == len(self.members)

    def __str__(self) -> str:
        return f"making {self.communicator!r} of ranks {', '.join(map(str, self.members))}"


Awaited = Operation | Making
"""What a host may wait for."""


class Rules:
    """All communicators of some ranks.

    Args:
        one_connection: whether the queues of a rank share one hardware connection, as under
            ``CUDA_DEVICE_MAX_CONNECTIONS=1``.

    Attributes:
        makings: communicators by name.
        queues: of each communicator, by rank, the entries that are not over, the running one first.
    """

    def __init__(self, *, one_connection: bool = False) -> None:
        self.makings: dict[str, Making] = {}
        self.queues: dict[str, dict[int, deque[list[Operation]]]] = {}
        self._one_connection = one_connection
        self._launches: defaultdict[tuple[int, str], deque[list[Operation]]] = defaultdict(deque)
        self._active: dict[str, dict[tuple[str, int, int], dict[int, deque[Operation]]]] = {}
        self._counts: defaultdict[tuple[str, int], int] = defaultdict(int)

    def arrive(self, rank: int, communicator: str, members: Sequence[int]) -> Making:
        """A host is where a communicator is made."""
        making = self.makings.get(communicator)
        if making is None:
            making = self.makings[communicator] = Making(communicator, members)
            self.queues[communicator] = {member: deque() for member in making.members}
            self._active[communicator] = {}
        making.here.add(rank)
        return making

    def enqueue(self, operations: Sequence[Operation]) -> list[tuple[Operation, ...]]:
        """One entry more in a queue; which operations have met now."""
        first = operations[0]
        entry = [*operations]
        for operation in entry:
            operation.entry = entry
            count = first.communicator, first.rank
            operation.index = self._counts[count]
            self._counts[count] += 1
        self.queues[first.communicator][first.rank].append(entry)
        self._unlaunched(first.rank, first.communicator).append(entry)
        return self._launch(first)

    def end(self, operation: Operation) -> list[tuple[Operation, ...]]:
        """An operation is over, of one rank, or comes to nothing; which others have met now."""
        operation.over = True
        sides = self._active[operation.communicator].get(operation.channel, {})
        if operation in (waiting := sides.get(_side(operation), deque())):
            waiting.remove(operation)
        queue = self.queues[operation.communicator][operation.rank]
        while queue and all(item.over for item in queue[0]):
            queue.popleft()
        return self._launch(operation)

    def _unlaunched(self, rank: int, communicator: str) -> deque[list[Operation]]:
        return self._launches[rank, "" if self._one_connection else communicator]

    def _launch(self, operation: Operation) -> list[tuple[Operation, ...]]:
        """Begin the operations that can begin on the connection of ``operation``."""
        met = []
        entries = self._unlaunched(operation.rank, operation.communicator)
        while entries:
            first = entries[0][0]
            queue = self.queues[first.communicator][first.rank]
            if queue and queue[0] is entries[0]:
                met += self._begin(entries[0])
            elif not all(entry.over for entry in entries[0]):
                break
            entries.popleft()
        return met

    def launched_before(self, rank: int, operation: Operation | None) -> list[Operation]:
        """The first of each entry that is to be launched before one of an operation, or of one that
        is to come, and could hold it up.
        """
        if not self._one_connection:
            return []
        entries = [*self._unlaunched(rank, "")]
        if operation is not None:
            place = [at for at, entry in enumerate(entries) if operation in entry]
            entries = entries[: place[0]] if place else []  # it was launched
        return [entry[0] for entry in entries]

    def _begin(self, entry: Iterable[Operation]) -> list[tuple[Operation, ...]]:
        met = []
        for operation in entry:
            channels = self._active[operation.communicator]
            sides = channels.setdefault(operation.channel, {})
            side = _side(operation)
            sides.setdefault(side, deque()).append(operation)
            if result := _meeting(sides, operation):
                for item in result:
                    sides[_side(item)].popleft()
                    item.meeting = result
                met.append(result)
        return met

    # --- what never ends ----------------------------------------------------------------------

    def stuck(self, hosts: Mapping[int, Collection[Awaited] | None]) -> Stuck:
        """Return the hosts and operations that can never end.

        Args:
            hosts: by rank, what its threads wait for; None where one of them may do anything. One
                that waits for nothing is at its end.
        """
        return Stuck(self, hosts)


def _side(operation: Operation) -> int:
    """Which side of its channel an operation is on: a collective's is its rank."""
    if operation.kind in MESSAGES:
        return int(operation.kind == RECEIVE)
    return operation.rank


def _meeting(
    sides: Mapping[int, deque[Operation]], operation: Operation
) -> tuple[Operation, ...] | None:
    """The operations that meet with a new one at the end of its side, if it is their turn."""
    wanted = (0, 1) if operation.kind in MESSAGES else operation.peers
    if not all(sides.get(item) for item in wanted):
        return None
    result = tuple(sides[item][0] for item in wanted)
    return result if _alike(result) else None


def _alike(operations: Sequence[Operation]) -> bool:
    first = operations[0]
    if first.kind in MESSAGES:
        return True
    return all(
        operation.kind == first.kind and operation.peers == first.peers for operation in operations
    )


Node = Operation | Making | int
"""An operation, a communicator, or the host of a rank."""


class Stuck:
    """The part of a state that no time ends.

    What may end is found from the hosts that may do anything, again and again until nothing more
    is: an operation may end where all before it in its queue may, and the same holds for each of
    its partners', or the partner's host may still bring it. A host may go on where something that
    one of its threads waits for may end.
    """

    def __init__(self, rules: Rules, hosts: Mapping[int, Collection[Awaited] | None]) -> None:
        self._rules, self._hosts = rules, hosts
        self._may_end: set[int] = set()
        self._free = {rank for rank, awaited in hosts.items() if awaited is None}
        self._partners = {
            id(item): self._partners_of(name, item)
            for name, queues in rules.queues.items()
            for queue in queues.values()
            for entry in queue
            for item in entry
            if not self.may_end(item)
        }
        while self._grow():
            pass

    def _partners_of(self, name: str, operation: Operation) -> dict[int, Operation | None]:
        """Of each other rank that takes part, the operation; None where it is not there yet."""
        results: dict[int, Operation | None] = {}
        queues = self._rules.queues[name]
        place = _pending(queues[operation.rank], operation.channel, operation.kind).index(operation)
        other = {SEND: RECEIVE, RECEIVE: SEND}.get(operation.kind, "")
        for rank in operation.peers:
            if rank != operation.rank or other:
                theirs = _pending(queues.get(rank, ()), operation.channel, other)
                results[rank] = theirs[place] if place < len(theirs) else None
        return results

    def _grow(self) -> bool:
        earlier = len(self._may_end), len(self._free)
        for making in self._rules.makings.values():
            if all(rank in making.here or rank in self._free for rank in making.members):
                self._may_end.add(id(making))
        for operation in self.operations:
            if self._all_may_come(operation):
                self._may_end.add(id(operation))
        for rank, awaited in self._hosts.items():
            if awaited and any(self.may_end(item) for item in awaited):
                self._free.add(rank)
        return earlier != (len(self._may_end), len(self._free))

    def _all_may_come(self, operation: Operation) -> bool:
        partners = self._partners[id(operation)]
        present = [partner for partner in partners.values() if partner is not None]
        if not _alike([operation, *present]) or self._ahead(
            operation.communicator, operation.rank, operation
        ):
            return False
        return all(
            self._may_come(operation.communicator, rank, partner)
            for rank, partner in partners.items()
        )

    def _may_come(self, name: str, rank: int, partner: Operation | None) -> bool:
        return self._ahead(name, rank, partner) is None and (
            partner is not None or rank in self._free
        )

    def _ahead(self, name: str, rank: int, operation: Operation | None) -> Operation | None:
        """The first that stays in a queue and holds up an operation, or one that is to come."""
        queue = self._rules.queues[name].get(rank, ())
        if result := self._staying(queue, operation):
            return result
        for item in self._rules.launched_before(rank, operation):
            if result := self._staying(self._rules.queues[item.communicator][rank], item):
                return result
        return None

    def _staying(
        self, queue: Iterable[Sequence[Operation]], operation: Operation | None
    ) -> Operation | None:
        """The first that stays in a queue before an operation, or of all."""
        for entry in queue:
            if operation in entry:
                return None
            for item in entry:
                if not self.may_end(item):
                    return item
        return None

    def may_end(self, awaited: Awaited) -> bool:
        """Whether an operation, or the making of a communicator, may end or is over."""
        return (
            awaited.over
            or (isinstance(awaited, Operation) and bool(awaited.meeting))
            or id(awaited) in self._may_end
        )

    @property
    def hosts(self) -> list[int]:
        """Ranks of which a host waits for what never ends."""
        return [
            rank
            for rank, awaited in self._hosts.items()
            if awaited and rank not in self._free and any(not item.over for item in awaited)
        ]

    @property
    def operations(self) -> list[Operation]:
        """Operations that stay in a queue."""
        return [
            item
            for queues in self._rules.queues.values()
            for queue in queues.values()
            for entry in queue
            for item in entry
            if not self.may_end(item)
        ]

    def cycle(self) -> list[Node]:
        """A cycle of waits, or a chain of waits for a host that is at its end."""
        start: list[Node] = [*self.hosts] or [*self.operations[:1]]
        if not start:
            return []
        path: list[Node] = [start[0]]
        while (result := self._blocker(path[-1])) is not None:
            if result in path:
                return path[path.index(result) :]
            path.append(result)
        return path

    def _blocker(self, node: Node) -> Node | None:
        """The node that a stuck one waits for; None for a host at its end."""
        if isinstance(node, int):
            return next(
                (item for item in self._hosts.get(node) or () if not self.may_end(item)), None
            )
        if isinstance(node, Making):
            return next(
                rank for rank in node.members if rank not in node.here and rank not in self._free
            )
        if ahead := self._ahead(node.communicator, node.rank, node):
            return ahead
        partners = self._partners[id(node)]
        for rank, partner in partners.items():
            if not self._may_come(node.communicator, rank, partner):
                if partner is None and rank in self._free:
                    return self._ahead(node.communicator, rank, None)
                return rank if partner is None else partner
        return next(
            (partner for partner in partners.values() if partner is not None), None
        )  # another kind

    def report(self) -> str:
        """The circle, and all that every rank has not ended."""
        lines = ["these wait for each other, whatever the times are:"]
        cycle = self.cycle()
        lines += [f"  {self._named(item)}  <-- waits for" for item in cycle]
        if cycle and (again := self._blocker(cycle[-1])) is not None:
            lines.append(f"  {self._named(again)}")
        elif cycle:
            lines[-1] = lines[-1].replace("<-- waits for", "<-- is at its end")
        return "\n".join([*lines, *self.state()])

    def state(self) -> list[str]:
        """Lines that tell what hosts wait for and what stands in queues."""
        lines = []
        for rank in sorted(self._hosts):
            awaited = self._hosts[rank]
            message = ", ".join(map(str, awaited or ())) or "nothing"
            lines.append(f"rank {rank}: " + ("runs" if awaited is None else f"waits for {message}"))
            for name, queues in self._rules.queues.items():
                for entry in queues.get(rank, ()):
                    text = " + ".join(map(_marked, entry))
                    lines.append(f"    {name!r}: {text}")
        return lines

    @staticmethod
    def _named(node: Node) -> str:
        if isinstance(node, Operation):
            return f"rank {node.rank}: {node}"
        return f"rank {node}: its host" if isinstance(node, int) else str(node)


def _marked(operation: Operation) -> str:
    text = str(operation).partition(" of ")[0] + ")"
    return f"{text} [under way]" if operation.meeting else text


def _pending(
    queue: Iterable[Sequence[Operation]], channel: tuple[str, int, int], kind: str
) -> list[Operation]:
    """Operations of one side of a channel that wait to meet; collectives count as one kind."""
    messages = kind in MESSAGES
    return [
        item
        for entry in queue
        for item in entry
        if not item.meeting
        and not item.over
        and item.channel == channel
        and (item.kind == kind if messages else item.kind not in MESSAGES)
    ]
