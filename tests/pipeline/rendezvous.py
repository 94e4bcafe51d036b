"""Point-to-point messages with the rules of NCCL, between threads of one process.

Operations of one communicator run in the order in which they were started, and a send is over
only when its receive has been started. Without ``connected``, the first operation of a communicator
returns when the other end has started one too. Where every rank waits and nothing can move, all
raise; a wait on any other thread ends by the clock.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Every rank waits for another one."""


@dataclass
class _Operation:
    """A send or receive; it is what ``isend`` and ``irecv`` return."""

    wire: Wire
    rank: int
    sends: bool
    tensor: Tensor
    done: bool = False

    def wait(self) -> bool:
        self.wire.await_(self)
        return True

    def is_completed(self) -> bool:
        return self.done


def by_direction(source: int, target: int) -> Hashable:
    """One communicator for each pair and direction."""
    return source, target


def by_pair(source: int, target: int) -> Hashable:
    """One communicator for each pair: both directions queue up behind each other."""
    return min(source, target), max(source, target)


class Wire:
    """What connects ``ranks`` threads."""

    def __init__(
        self,
        ranks: int,
        communicator: Callable[[int, int], Hashable] = by_direction,
        *,
        connected: bool = True,
    ) -> None:
        self._connected = connected
        self._communicator = communicator
        self._changed = threading.Condition()
        self._queues: dict[Hashable, dict[int, deque[_Operation]]] = defaultdict(
            lambda: defaultdict(deque)
        )
        self._meetings: dict[Hashable, dict[int, _Operation]] = defaultdict(dict)
        self._running = ranks
        self._threads: set[int] = set()
        self._waiting: dict[int, _Operation] = {}
        self._stuck = False

    def start(self, source: int, target: int, operation: _Operation) -> _Operation:
        communicator = self._communicator(source, target)
        if not self._connected:
            self._meet(communicator, operation)
        with self._changed:
            ends = self._queues[communicator]
            ends[operation.rank].append(operation)
            self._move(ends[source], ends[target])
            self._changed.notify_all()
        return operation

    def _meet(self, communicator: Hashable, operation: _Operation) -> None:
        """Wait until both ends of a communicator have begun."""
        with self._changed:
            begun = self._meetings[communicator]
            mine = begun.setdefault(operation.rank, replace(operation))
            if len(begun) == 2:
                for each in begun.values():
                    each.done = True
                self._changed.notify_all()
        self.await_(mine)

    def await_(self, operation: _Operation) -> None:
        thread = threading.get_ident()
        with self._changed:
            if thread in self._threads:
                self._waiting[thread] = operation
                self._look()
            self._changed.wait_for(lambda: operation.done or self._stuck, Port.timeout)
            self._waiting.pop(thread, None)
            if not operation.done:
                raise DeadlockError(f"rank {operation.rank} waits for ever")

    def join(self) -> None:
        """This thread is a rank."""
        with self._changed:
            self._threads.add(threading.get_ident())

    def leave(self) -> None:
        """A rank is at its end."""
        with self._changed:
            self._threads.discard(threading.get_ident())
            self._running -= 1
            self._look()

    @staticmethod
    def _move(one: deque[_Operation], other: deque[_Operation]) -> None:
        while one and other and one[0].sends != other[0].sends:
            first, second = one.popleft(), other.popleft()
            send, receive = (first, second) if first.sends else (second, first)
            receive.tensor.copy_(send.tensor)
            first.done = second.done = True

    def _look(self) -> None:
        stands = all(not operation.done for operation in self._waiting.values())
        if self._waiting and stands and len(self._waiting) == self._running:
            self._stuck = True
            self._changed.notify_all()


class Port:
    """One rank's end of a wire."""

    timeout = 30.0

    def __init__(self, wire: Wire, rank: int) -> None:
        self.rank = rank
        self._wire = wire

    def named(self, peer: int) -> str:
        return f"rank {peer}"

    def isend(self, tensor: Tensor, peer: int) -> Any:
        operation = _Operation(self._wire, self.rank, True, tensor)
        return self._wire.start(self.rank, peer, operation)

    def irecv(self, buffer: Tensor, peer: int) -> Any:
        operation = _Operation(self._wire, self.rank, False, buffer)
        return self._wire.start(peer, self.rank, operation)


def on_every_rank(ranks: int, wire: Wire, function: Callable[[Port], T]) -> list[T]:
    """``function(port)`` on a thread for each rank; results by rank, or the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        wire.join()
        try:
            results[rank] = function(Port(wire, rank))
        except BaseException as error:
            errors.append(error)
        finally:
            wire.leave()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(ranks)]
