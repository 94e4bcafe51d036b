"""The process that holds running ranks to the rules: all tell it what they enqueue and wait for,
and it tells them what may run.

It is on nobody's side, so that it outlives each of them, and it has the only clock for delays.
Messages are lines of JSON. Started as ``python -S -m tests.strict_group.referee``; prints its port,
and ends with the last connection.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import selectors
import socket
import sys
import time
from collections import defaultdict
from typing import Any

from . import Settings
from .rules import Awaited, Operation, Rules, group_of

_ANYBODY = 60.0  # seconds until all must have come
_QUIET = 0.003  # seconds without a message after which it looks for what is stuck
_AT_LEAST = 0.1  # ... and how often where it is never quiet


class _Rank:
    """One connection.

    Attributes:
        number: its rank.
        operations: what it has enqueued, by its own numbers.
        threads: what each of its threads waited for last.
        free: whether one that does not wait may do something.
        left: whether it says nothing more.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.number = -1
        self.operations: dict[int, Operation] = {}
        self.names: dict[Operation, int] = {}
        self.threads: dict[int, Awaited] = {}
        self.free = True
        self.left = False
        self._unread = b""

    def read(self) -> list[Any] | None:
        """The messages that have come; None at the end."""
        try:
            data = self.connection.recv(65536)
        except OSError:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def tell(self, *message: object) -> None:
        """Send it something, if it is there."""
        if self.left:
            return
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.left = True

    @property
    def awaited(self) -> list[Awaited] | None:
        """Operations that its threads wait for; None if some thread may act."""
        if self.left:
            return []
        results = [*self.threads.values()]
        return None if self.free or not results or any(item.over for item in results) else results


class Referee:
    """Drives the rules by what ranks say and by the clock.

    Args:
        world: how many ranks there are.
        settings: how strict it is.
    """

    def __init__(self, world: int, settings: Settings) -> None:
        self._world, self._settings = world, settings
        self._rules = Rules(one_connection=settings.one_connection)
        self._ranks: dict[int, _Rank] = {}
        self._gone: dict[str, dict[int, str]] = defaultdict(dict)  # of a group; "" of all
        self._timers: list[tuple[float, int, tuple[Operation, ...]]] = []
        self._order = itertools.count()
        self._changed = self._looked = 0.0
        self._verdict = ""

    def serve(self, listener: socket.socket) -> None:
        """Until the last rank has gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ, None)
            deadline = time.monotonic() + _ANYBODY
            while len(selector.get_map()) > 1 or (
                len(self._ranks) < self._world and time.monotonic() < deadline
            ):
                for key, _ in selector.select(self._pause()):
                    if key.data is None:
                        connection, _ = listener.accept()
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        selector.register(connection, selectors.EVENT_READ, _Rank(connection))
                    else:
                        self._hear(key.data, selector)
                self._release()
                self._look()

    def _pause(self) -> float:
        """Seconds for which there is nothing to do if nobody speaks."""
        now, until = time.monotonic(), [1.0]
        if self._timers:
            until.append(self._timers[0][0] - now)
        if self._changed:
            until.append(self._changed + _QUIET - now)
        return max(0.0, min(until))

    def _hear(self, rank: _Rank, selector: selectors.BaseSelector) -> None:
        messages = rank.read()
        self._changed = time.monotonic()
        if messages is None:
            selector.unregister(rank.connection)
            rank.connection.close()
            if not rank.left:
                rank.left = True
                self._leave(rank.number, "", "its process has ended")
            return
        for subject, *rest in messages:
            getattr(self, f"_on_{subject}")(rank, *rest)

    # --- what ranks say -------------------------------------------------------------------------

    def _on_hello(self, rank: _Rank, number: int) -> None:
        rank.number = number
        self._ranks[number] = rank

    def _on_make(self, rank: _Rank, thread: int, name: str, members: list[int]) -> None:
        making = self._rules.arrive(rank.number, name, members)
        rank.threads[thread] = making
        if self._verdict:
            rank.tell("stuck", self._verdict)
        elif lost := self._lost(name, members):
            rank.tell("unmade", name, lost)
        elif making.over:
            for member in members:
                self._ranks[member].tell("made", name)

    def _on_enqueue(self, rank: _Rank, name: str, parts: list[list[Any]]) -> None:
        operations = []
        for number, kind, peers, size in parts:
            operation = Operation(rank.number, name, kind, peers, size)
            rank.operations[number], rank.names[operation] = operation, number
            operations.append(operation)
        met = self._rules.enqueue(operations)
        for operation in operations:
            if lost := self._lost(name, operation.peers):
                self._fail(operation, lost)
        self._meet(met)

    def _on_wait(self, rank: _Rank, thread: int, number: int) -> None:
        if number in rank.operations:
            rank.threads[thread] = rank.operations[number]
        if self._verdict:
            rank.tell("stuck", self._verdict)

    def _on_waited(self, rank: _Rank, thread: int) -> None:
        rank.threads.pop(thread, None)

    def _on_free(self, rank: _Rank, free: bool) -> None:
        rank.free = free

    def _on_over(self, rank: _Rank, number: int) -> None:
        if (operation := rank.operations.pop(number, None)) is not None:
            rank.names.pop(operation, None)
            self._meet(self._rules.end(operation))

    def _on_abort(self, rank: _Rank, name: str, why: str) -> None:
        self._leave(rank.number, name, why)

    def _on_gone(self, rank: _Rank) -> None:
        rank.left = True
        self._leave(rank.number, "", "it has destroyed its process group")

    def _on_state(self, rank: _Rank, token: int) -> None:
        rank.tell("state", token, "\n".join(self._stuck().state()))

    # --- what becomes of it -----------------------------------------------------------------------

    def _meet(self, met: list[tuple[Operation, ...]]) -> None:
        for operations in met:
            first = operations[0]
            if any(item.size != first.size for item in operations):
                message = ", ".join(f"rank {item.rank} has {item.size}" for item in operations)
                for operation in operations:
                    self._end(operation, f"{first} meets others than itself: {message}")
                continue
            seconds = self._delay(first)
            entry = time.monotonic() + seconds, next(self._order), operations
            if seconds:
                heapq.heappush(self._timers, entry)
            else:
                self._run(operations)

    def _delay(self, first: Operation) -> float:
        """Seconds for which what has met is under way."""
        seconds, seed = self._settings.ms / 1000, self._settings.seed
        return (
            seconds
            if seed < 0
            else random.Random(f"{seed} {first} {first.rank}").random() * seconds
        )

    def _release(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            self._run(heapq.heappop(self._timers)[2])

    def _run(self, operations: tuple[Operation, ...]) -> None:
        """Tell all ranks at once, so that all have one order."""
        for operation in operations:
            if (rank := self._ranks[operation.rank]) and operation in rank.names:
                rank.tell("go", rank.names[operation])

    def _lost(self, name: str, peers: object) -> str:
        """Which of some ranks are not in a communicator any more, and why."""
        gone = {**self._gone[""], **self._gone[group_of(name)]}
        assert isinstance(peers, list | tuple)
        return "; ".join(f"rank {peer} has left, as {gone[peer]}" for peer in peers if peer in gone)

    def _leave(self, number: int, name: str, why: str) -> None:
        """A rank takes no more part in a group; in none, without a name."""
        self._gone[name][number] = why
        reason = f"rank {number} has left, as {why}"
        for of, queues in self._rules.queues.items():
            if name in ("", group_of(of)):
                for rank, queue in queues.items():
                    for operation in [item for entry in queue for item in entry]:
                        if rank == number or number in operation.peers:
                            self._fail(operation, reason)
        for of, making in self._rules.makings.items():
            if name in ("", group_of(of)) and not making.over and number in making.members:
                for member in making.here:
                    self._ranks[member].tell("unmade", of, reason)

    def _fail(self, operation: Operation, why: str) -> None:
        """It never runs, nor do those that it has met; what is under way already ends by itself."""
        if operation.over:
            return
        if not operation.meeting:
            self._end(operation, why)
        for timer in [item for item in self._timers if operation in item[2]]:
            self._timers.remove(timer)
            heapq.heapify(self._timers)
            for other in timer[2]:
                self._end(other, why)

    def _end(self, operation: Operation, why: str) -> None:
        """It comes to nothing and holds up nothing more."""
        rank = self._ranks[operation.rank]
        if operation in rank.names:
            number = rank.names.pop(operation)
            rank.operations.pop(number)
            rank.tell("failed", number, why)
        self._meet(self._rules.end(operation))

    def _stuck(self) -> Any:
        hosts = {number: rank.awaited for number, rank in self._ranks.items()}
        # Who has not come yet may do anything.
        return self._rules.stuck({**dict.fromkeys(range(self._world)), **hosts})

    def _look(self) -> None:
        """Whether somebody waits for what never comes: all ranks hear of it."""
        now = time.monotonic()
        quiet = now - self._changed >= _QUIET
        if not self._changed or self._verdict or not (quiet or now - self._looked >= _AT_LEAST):
            return
        self._looked = now
        if quiet:
            self._changed = 0.0
        stuck = self._stuck()
        if stuck.hosts:
            self._verdict = stuck.report()
            for rank in self._ranks.values():
                rank.tell("stuck", self._verdict)


def main() -> None:
    """Serve one default process group."""
    world, message = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        Referee(int(world), Settings.of(message) or Settings()).serve(listener)


if __name__ == "__main__":
    main()
