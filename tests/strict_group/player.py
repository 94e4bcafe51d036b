"""Plays queues that are written down by the rules, without processes, threads or times.

A program has for each rank what its host does, in order:

- ``("op", communicator, kind, peers)``: enqueue a ``"send"`` or ``"receive"`` with ``(partner,)``,
  or a collective of all members;
- ``("group", communicator, [(kind, peers), ...])``: enqueue several as one;
- ``("wait", communicator, index)``: wait until this rank's operation of that place on the
  communicator is over.

Communicators have their members, and whether they are made eagerly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .rules import Awaited, Operation, Rules, Stuck

Item = tuple[Any, ...]
Program = Mapping[int, Sequence[Item]]
Communicators = Mapping[str, tuple[Sequence[int], bool]]


class Verdict(NamedTuple):
    """Whether a program ends.

    Attributes:
        ends: whether all hosts come to their ends, and all operations.
        report: what waits for each other, where they do not.
    """

    ends: bool
    report: str = ""


class _Host:
    """One rank's program, played as far as it goes."""

    def __init__(self, rank: int, items: Sequence[Item]) -> None:
        self.rank, self._items = rank, items
        self._place = 0
        self._given: dict[tuple[str, int], Operation] = {}
        self.awaited: Awaited | None = None

    def step(self, rules: Rules, communicators: Communicators) -> list[tuple[Operation, ...]]:
        """Do the next item; which operations have met now."""
        subject, communicator, *rest = self._items[self._place]
        if subject == "wait":
            awaited = self._given.get((communicator, rest[0]))
            if awaited is None:
                raise ValueError(f"rank {self.rank} waits for what it has not enqueued: {rest[0]}")
            self.awaited = awaited
            self._place += 1
            return []
        making = rules.arrive(self.rank, communicator, communicators[communicator][0])
        if not making.over:
            self.awaited = making  # and then comes here again
            return []
        self._place += 1
        parts = [tuple(rest)] if subject == "op" else rest[0]
        operations = [Operation(self.rank, communicator, *part) for part in parts]
        met = rules.enqueue(operations)
        self._given |= {(communicator, operation.index): operation for operation in operations}
        return met

    @property
    def runs(self) -> bool:
        """Whether it has something to do and waits for nothing."""
        return self._place < len(self._items) and (self.awaited is None or self.awaited.over)

    @property
    def is_done(self) -> bool:
        """Whether it is at its end."""
        return self._place == len(self._items) and not self.waits_for

    @property
    def waits_for(self) -> tuple[Awaited, ...]:
        """The operation that it waits for, if any."""
        return (self.awaited,) if self.awaited is not None and not self.awaited.over else ()


class Player:
    """A program as far as it has been played.

    Args:
        program: by rank.
        communicators: by name.
        one_connection: see ``Rules``.
    """

    def __init__(
        self, program: Program, communicators: Communicators, *, one_connection: bool = False
    ) -> None:
        self._rules = Rules(one_connection=one_connection)
        self._communicators = communicators
        for name, (members, eager) in communicators.items():
            for member in members if eager else ():
                self._rules.arrive(member, name, members)
        self._hosts = [_Host(rank, items) for rank, items in program.items()]
        self._met: list[Operation] = []

    def moves(self) -> list[_Host | Operation]:
        """The possible next moves: a host's next step, or the end on one rank of an operation that
        has met its partners.
        """
        return [*(host for host in self._hosts if host.runs), *self._met]

    def move(self, what: _Host | Operation) -> None:
        """One of these happens."""
        if isinstance(what, _Host):
            met = what.step(self._rules, self._communicators)
        else:
            self._met.remove(what)
            met = self._rules.end(what)
        self._met += [operation for operations in met for operation in operations]

    @property
    def ended(self) -> bool:
        """Whether all hosts and all queues are at their ends."""
        queues = [queue for item in self._rules.queues.values() for queue in item.values()]
        return all(host.is_done for host in self._hosts) and not any(queues)

    def stuck(self) -> Stuck:
        """The hosts and operations that never move again, in any order of moves."""
        return self._rules.stuck(
            {host.rank: None if host.runs else host.waits_for for host in self._hosts}
        )


def play(
    program: Program, communicators: Communicators, *, one_connection: bool = False
) -> Verdict:
    """Play a program to its end, or to where nothing goes on."""
    player = Player(program, communicators, one_connection=one_connection)
    while moves := player.moves():
        player.move(moves[-1])
    return Verdict(True) if player.ended else Verdict(False, player.stuck().report())
