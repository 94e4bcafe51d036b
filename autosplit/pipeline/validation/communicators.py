"""Whether what the ranks of a step enqueue comes to its end under NCCL's rules, whatever it takes.

A rank's host puts operations into queues. A communicator is a queue, for torch gives each a stream
of its own; so is the stream that computes. The rules, with their sources, are in ``docs/nccl.md``:

- an operation starts when all before it in its queues have ended, and what it waits for besides
  (events, and whatever has held the host before it was enqueued);
- it ends when each of its parts has met its counterparts, and these meet when all of them have
  started: the k-th send from one rank to another and the k-th receive there, the k-th collective
  of all members. Parts of one operation, a coalesced group, do not wait for each other.

So "starts" and "ends" of operations are nodes, each with those that must come before it, and a step
ends, in whatever time anything takes, if and only if no node comes before itself. A network that
buffers a send lets it end before its receive starts: that takes needs away and adds none, so what
ends without buffers ends with any.
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
"""The queue of the stream that computes."""
HOST = "host"
"""That of waits of the host itself, which enqueues nothing more before they end."""


class Part(NamedTuple):
    """What an operation does with other ranks, or one of several such things.

    Attributes:
        communicator: over which.
        kind: a send, a receive, or the name of a collective.
        peers: the other rank of a message; all members of a collective.
    """

    communicator: str
    kind: str
    peers: tuple[int, ...]

    @property
    def is_message(self) -> bool:
        """Whether this is between two ranks."""
        return self.kind in (SEND, RECEIVE)


class Operation(NamedTuple):
    """Something that a rank's host enqueues.

    Attributes:
        text: for people.
        queues: in which it stands.
        parts: with other ranks.
        after: places, among the rank's operations, of earlier ones whose ends it waits for.
    """

    text: str
    queues: tuple[str, ...]
    parts: tuple[Part, ...] = ()
    after: tuple[int, ...] = ()


Programs: TypeAlias = Mapping[int, Sequence[Operation]]
"""Per rank what its host enqueues, in order."""

Sharing = Literal["streams", "launches", "kernels"]
"""What queues of one device have in common: nothing; the one connection over which it is told what
to start, in the host's order (``CUDA_DEVICE_MAX_CONNECTIONS=1``); or room for one kernel that
communicates, in that order.
"""

Place = tuple[int, int]
"""A rank, and the place of one of its operations."""

_Node = tuple[object, ...]
_WIDEST = 40


@dataclass(frozen=True)
class Stuck:
    """Why a step never ends.

    Attributes:
        programs: of all ranks.
        circle: operations of which each waits for the next, and the last for the first; or one
            that waits for what never comes.
        lacks: that, in words.
    """

    programs: Programs
    circle: tuple[Place, ...]
    lacks: str = ""

    def __str__(self) -> str:
        marks: dict[Place, str] = {}
        notes: dict[int, str] = {}
        lines = []
        for number, (here, there) in enumerate(pairwise((*self.circle, self.circle[0])), 1):
            other = f" of rank {there[0]}" if there[0] != here[0] else ""
            said = f"<-- waits for {self.lacks or self._text(there) + other}"
            lines.append(f"{number}. rank {here[0]}: {self._text(here)} {said}")
            marks[here] = f"^{number}"
            if other or self.lacks:
                notes[here[0]] = said
        rows = [
            dict(enumerate(operation.text for operation in program))
            for _, program in sorted(self.programs.items())
        ]
        return "\n".join([*lines, format_grid(rows, marks, widest=_WIDEST, notes=notes)])

    def _text(self, place: Place) -> str:
        return self.programs[place[0]][place[1]].text


def stuck(programs: Programs, sharing: Sharing = "streams") -> Stuck | None:
    """Why a step never ends; None: it ends, whatever anything takes.

    Args:
        programs: what each rank enqueues.
        sharing: what the queues of a device share.
    """
    graph: dict[_Node, list[_Node]] = {}
    for rank, program in programs.items():
        _add_rank(graph, rank, program, sharing)
    for meeting, parts in _meetings(programs).items():
        if lacks := _lack(parts):
            return Stuck(programs, (parts[0][0],), lacks)
        graph[meeting] = [(*place, "starts") for place, _ in parts]
        for place, _ in parts:
            graph[*place, "ends"].append(meeting)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        places = [node[:2] for node in reversed(error.args[1]) if node[-1] != "meets"]
        # Start and end of one operation are one line.
        circle = [one for one, other in pairwise((*places, places[0])) if one != other]
        return Stuck(programs, tuple(circle))
    return None


def _add_rank(
    graph: dict[_Node, list[_Node]], rank: int, program: Sequence[Operation], sharing: Sharing
) -> None:
    last: dict[str, int] = {}  # of each queue
    held: list[int] = []
    for place, operation in enumerate(program):
        queues = operation.queues
        if sharing == "kernels" and any(part.communicator in queues for part in operation.parts):
            queues = (*queues, "kernels")
        behind = {*operation.after, *held, *(last[each] for each in queues if each in last)}
        before: list[_Node] = [(rank, each, "ends") for each in behind]
        if sharing == "launches" and place:
            before.append((rank, place - 1, "starts"))
        graph[rank, place, "starts"] = before
        graph[rank, place, "ends"] = [(rank, place, "starts")]
        last |= dict.fromkeys(queues, place)
        held = [place] if HOST in queues else held


def _meetings(programs: Programs) -> dict[_Node, list[tuple[Place, Part]]]:
    """What meets: of each message the send and the receive, of each collective all of it."""
    found: dict[_Node, list[tuple[Place, Part]]] = defaultdict(list)
    for rank, program in programs.items():
        counts: Counter[_Node] = Counter()
        for place, operation in enumerate(program):
            for part in operation.parts:
                sends = part.kind == SEND
                ends = (rank, *part.peers) if sends else (*part.peers, rank)
                way = part.communicator, *(ends if part.is_message else ())
                counts[*way, sends] += 1
                found[*way, counts[*way, sends], "meets"].append(((rank, place), part))
    return found


def _lack(parts: Sequence[tuple[Place, Part]]) -> str:
    """Of what is to meet, why it never does; empty if it may."""
    first = parts[0][1]
    if first.is_message:
        return "" if len(parts) == 2 else f"rank {first.peers[0]}, which never comes to it"
    came = {place[0]: part for place, part in parts}
    for rank in sorted({*first.peers, *came}):
        if rank not in came:
            return f"rank {rank}, which never comes to {first.kind}"
        if came[rank] != first:
            return f"{first.kind} of rank {rank}, which comes to {came[rank].kind}"
    return ""
