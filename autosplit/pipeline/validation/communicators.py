"""Decide whether a step ends under NCCL's rules, however long its operations take.

A rank's host puts operations into queues. Each communicator is a queue, because torch gives it a
stream of its own; so is the compute stream. The rules, with their sources, are in ``docs/nccl.md``:

- An operation starts when all earlier operations of its queues have ended, and all operations that
  it waits for. An operation waits for an earlier one through an event, or because the host waited
  for the earlier operation before it enqueued the later one.
- An operation ends when each of its parts has met its counterparts. Counterparts meet when all of
  them have started: the k-th send from one rank to another and the k-th receive there, or the k-th
  collective of all members. Parts of one operation, a coalesced group, do not wait for each other.

So the starts and ends of operations are the nodes of a graph, with an edge from each node to the
nodes that must come before it. A step ends, in whatever time, if and only if the graph has no
cycle. A network with buffers lets a send end before its receive starts. That removes edges and adds
none, so a step that ends without buffers also ends with buffers.
"""

from __future__ import annotations

import graphlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from .grid import format_grid

SEND, RECEIVE = "send", "receive"
COMPUTE = "compute"
"""The queue of the compute stream."""
HOST = "host"
"""The queue of waits that hold the host: it enqueues nothing before they end."""


class Part(NamedTuple):
    """One exchange of an operation with other ranks.

    Attributes:
        communicator: the name of the communicator.
        kind: a send, a receive, or the name of a collective.
        peers: the other rank of a message; all members of a collective.
    """

    communicator: str
    kind: str
    peers: tuple[int, ...]

    @property
    def is_message(self) -> bool:
        """Whether the part is a send or a receive."""
        return self.kind in (SEND, RECEIVE)


class Operation(NamedTuple):
    """An operation that a rank's host enqueues.

    Attributes:
        text: the operation's name in error texts.
        queues: the queues that hold the operation.
        parts: the operation's exchanges with other ranks.
        after: places in the program of the earlier operations for which this operation waits.
    """

    text: str
    queues: tuple[str, ...]
    parts: tuple[Part, ...] = ()
    after: tuple[int, ...] = ()


Programs: TypeAlias = Mapping[int, Sequence[Operation]]
"""The operations that the host of each rank enqueues, in order."""

Sharing = Literal["streams", "launches", "kernels"]
"""What the queues of one device share: nothing; one connection, over which operations start in the
host's order (``CUDA_DEVICE_MAX_CONNECTIONS=1``); or room for one communication kernel at a time, in
that order.
"""

Place = tuple[int, int]
"""A rank, and the place of an operation in its program."""

_Node = tuple[object, ...]
_WIDEST = 40


@dataclass(frozen=True)
class Deadlock:
    """The reason why a step never ends.

    Attributes:
        programs: the programs of all ranks.
        circle: operations of which each waits for the next operation, and the last waits for the
            first; or a single operation whose counterpart never comes.
        lacks: the missing counterpart, in words.
    """

    programs: Programs
    circle: tuple[Place, ...]
    lacks: str = ""

    def __str__(self) -> str:
        marks: dict[Place, str] = {}
        notes: dict[int, str] = {}
        lines = []
        for number, (waiting, blocking) in enumerate(pairwise((*self.circle, self.circle[0])), 1):
            other = f" of rank {blocking[0]}" if blocking[0] != waiting[0] else ""
            note = f"<-- waits for {self.lacks or self._text(blocking) + other}"
            lines.append(f"{number}. rank {waiting[0]}: {self._text(waiting)} {note}")
            marks[waiting] = f"^{number}"
            if other or self.lacks:
                notes[waiting[0]] = note
        rows = [
            dict(enumerate(operation.text for operation in program))
            for _, program in sorted(self.programs.items())
        ]
        return "\n".join([*lines, format_grid(rows, marks, widest=_WIDEST, notes=notes)])

    def _text(self, place: Place) -> str:
        return self.programs[place[0]][place[1]].text


def find_deadlock(programs: Programs, sharing: Sharing = "streams") -> Deadlock | None:
    """Return the reason why a step never ends, or None if it always ends.

    Args:
        programs: the operations of each rank.
        sharing: what the queues of one device share, see ``Sharing``.
    """
    graph: dict[_Node, list[_Node]] = {}
    for rank, program in programs.items():
        _add_rank(graph, rank, program, sharing)
    for meeting, parts in _meetings(programs).items():
        if lacks := _lack(parts):
            return Deadlock(programs, (parts[0][0],), lacks)
        graph[meeting] = [(*place, "starts") for place, _ in parts]
        for place, _ in parts:
            graph[*place, "ends"].append(meeting)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        places = [node[:2] for node in reversed(error.args[1]) if node[-1] != "meets"]
        # Start and end of one operation are one line.
        circle = [one for one, other in pairwise((*places, places[0])) if one != other]
        return Deadlock(programs, tuple(circle))
    return None


def _add_rank(
    graph: dict[_Node, list[_Node]], rank: int, program: Sequence[Operation], sharing: Sharing
) -> None:
    last: dict[str, int] = {}  # of each queue
    host_waits: list[int] = []
    for place, operation in enumerate(program):
        queues = operation.queues
        if sharing == "kernels" and any(part.communicator in queues for part in operation.parts):
            queues = (*queues, "kernels")
        predecessors = {
            *operation.after,
            *host_waits,
            *(last[queue] for queue in queues if queue in last),
        }
        required: list[_Node] = [(rank, predecessor, "ends") for predecessor in predecessors]
        if sharing == "launches" and place:
            required.append((rank, place - 1, "starts"))
        graph[rank, place, "starts"] = required
        graph[rank, place, "ends"] = [(rank, place, "starts")]
        last |= dict.fromkeys(queues, place)
        host_waits = [place] if HOST in queues else host_waits


def _meetings(programs: Programs) -> dict[_Node, list[tuple[Place, Part]]]:
    """Groups of (place, part) that must meet: send and receive of a message, or all parts of a
    collective.
    """
    meetings: dict[_Node, list[tuple[Place, Part]]] = defaultdict(list)
    for rank, program in programs.items():
        counts: Counter[_Node] = Counter()
        for place, operation in enumerate(program):
            for part in operation.parts:
                sends = part.kind == SEND
                ends = (rank, *part.peers) if sends else (*part.peers, rank)
                way = part.communicator, *(ends if part.is_message else ())
                counts[*way, sends] += 1
                meetings[*way, counts[*way, sends], "meets"].append(((rank, place), part))
    return meetings


def _lack(parts: Sequence[tuple[Place, Part]]) -> str:
    """The reason why an operation never completes on all of its ranks; empty if it may complete."""
    first = parts[0][1]
    if first.is_message:
        return (
            ""
            if len(parts) == 2
            else f"rank {first.peers[0]}, which never enqueues the counterpart"
        )
    came = {place[0]: part for place, part in parts}
    for rank in sorted({*first.peers, *came}):
        if rank not in came:
            return f"rank {rank}, which never enqueues {first.kind}"
        if came[rank] != first:
            return f"{first.kind} of rank {rank}, which enqueues {came[rank].kind} instead"
    return ""
