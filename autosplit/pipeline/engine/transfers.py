"""Storages on their way to a partner or to the host: threads that carry them, and what they cost.

Between partner ranks they travel over process groups of their own. The sizes go ahead, for they may
depend on the data. Then comes one storage after the other: the sender lets each go as soon as it
has left, and the receiver makes room for it when its turn comes.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.device import OwnStream, done_so_far, settle
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.moves import journeys_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.timeline import Span
from autosplit.pipeline.simulation.transfer import MoveCosts
from autosplit.torch_internals.allocations import sizes_known

from .groups import Groups, losing
from .host_store import HostStore


class TransferredBytes:
    """Counts from any thread what comes, from when its memory is made, and what has gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self._highest = 0

    def change(self, more: int) -> None:
        """There are so many bytes more, or fewer."""
        with self._lock:
            self._now += more
            self._highest = max(self._highest, self._now)

    def most(self) -> int:
        """The most that there were at any time since the last call, above those at that call."""
        with self._lock:
            found = self._highest
            self._now = self._highest = 0
        return found


_NOTED = 64  # of the last moves


class MoveTimes:
    """For how long moves kept the thread of a rank whose stages are on ``device``; on an
    accelerator the host's time is not noted, for it runs ahead.

    Attributes:
        leaving: what set off a departure, the last ones.
        coming: what put back what came, likewise.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = device.type == "cpu"
        self.leaving: deque[float] = deque(maxlen=_NOTED)
        self.coming: deque[float] = deque(maxlen=_NOTED)

    def costs(self) -> MoveCosts:
        """The medians; nothing of what has not been seen."""
        if not self._counts:
            return MoveCosts()
        return MoveCosts(*(statistics.median(n or [0.0]) for n in (self.leaving, self.coming)))


@contextlib.contextmanager
def noting(seconds: deque[float]) -> Iterator[None]:
    """Note how long that takes."""
    begun = perf_counter()
    yield
    seconds.append(perf_counter() - begun)


class Move:
    """One move of a step, from where its rank starts it until it has ended.

    Attributes:
        action: the move.
        by_host: whether it depends on this rank's host alone, and not on another rank.
        ended: when.
        future: what comes of it.
    """

    future: Future[Any]

    def __init__(self, action: Action, by_host: bool) -> None:
        self.action = action
        self.by_host = by_host
        self._started = perf_counter()
        self.ended = 0.0

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.future.done() and self.future.exception() is not None

    def span(self, rank: int) -> Span:
        """When that was."""
        return Span(rank, self.action, self._started, self.ended)


class Lane:
    """A thread, and on an accelerator a stream, that carries out one move after another.

    Args:
        name: of the thread.
        device: where what it carries lies.

    Attributes:
        counted: whether another thread counts what this process allocates.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._device = device
        self._stream = OwnStream(device)
        self.counted = False

    def carry(self, move: Move, work: Callable[[], Any]) -> Move:
        """Do ``work`` when all before it is done, and behind what the device was given so far."""
        given = done_so_far(self._device)
        counted = self.counted and self._device.type == "cpu"

        def run() -> Any:
            sizes = sizes_known() if counted else contextlib.nullcontext()
            try:
                with self._stream.behind(given), torch.inference_mode(False), sizes:
                    return work()
            finally:
                move.ended = perf_counter()

        move.future = self._pool.submit(run)
        return move


LANE = "memory"
"""The lanes between partners."""


def partner_pairs(schedule: Schedule) -> set[tuple[int, int]]:
    """The pairs of ranks, the lower one first, between which storages travel."""
    ends = [(each.rank, each.partner) for each in journeys_of(schedule) if each.partner is not None]
    return {(min(pair), max(pair)) for pair in ends}


class PartnerLink:
    """This rank's end of the two lanes between it and its partner.

    Args:
        groups: the trainer's process groups, in which the two are connected.
        partner: the other rank.
        device: where storages lie.
        transferred: is told what comes and goes.
    """

    def __init__(
        self, groups: Groups, partner: int, device: torch.device, transferred: TransferredBytes
    ) -> None:
        self._transferred = transferred
        self._name = groups.named(partner)
        self._number = groups.number_in_pair(partner)
        self._timeout = groups.timeout
        self._device = device
        self._out = groups.between(groups.rank, partner, LANE)
        self._in = groups.between(partner, groups.rank, LANE)

    def send_sizes(self, storages: Sequence[Tensor], what: str) -> None:
        """Tell the partner what comes.

        Args:
            storages: what.
            what: whose they are, for errors.

        Raises:
            LostPeerError: it did not take that.
        """
        sizes = [tensor.numel() for tensor in storages]
        self._send(self._numbers([len(sizes)]), what)
        if sizes:
            self._send(self._numbers(sizes), what)

    def receive_sizes(self, what: str) -> list[int]:
        """Hear what comes; arguments and errors as for ``send_sizes``."""
        count = self._numbers([0])
        self._receive(count, what)
        sizes = self._numbers([0] * int(count))
        if len(sizes):
            self._receive(sizes, what)
        found: list[int] = sizes.tolist()
        return found

    def leave(self, storages: list[Tensor], what: str) -> None:
        """Send storages behind their sizes; arguments and errors as for ``send``."""
        self.send_sizes(storages, what)
        self.send(storages, what)

    def come(self, sizes: Sequence[int], tickets: None, what: str, found: list[Tensor]) -> None:
        """``receive`` what left."""
        self.receive(sizes, what, found)

    def send(self, storages: list[Tensor], what: str) -> None:
        """Send storages; empties the list as they leave. Errors as for ``send_sizes``."""
        storages.reverse()
        while storages:
            self._send(storages[-1], what)
            self._transferred.change(-storages.pop().numel())

    def receive(self, sizes: Sequence[int], what: str, found: list[Tensor]) -> None:
        """Receive storages of these sizes into a list, in which each is from when there is room
        for it. Errors as for ``send_sizes``.
        """
        for size in sizes:
            self._transferred.change(size)
            found.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            self._receive(found[-1], what)

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _send(self, data: Tensor, what: str) -> None:
        self._run(self._out.send([data], self._number, 0), what)

    def _receive(self, data: Tensor, what: str) -> None:
        self._run(self._in.recv([data], self._number, 0), what)

    def _run(self, work: dist.Work | None, what: str) -> None:
        # In another thread than that whose waits are watched.
        with losing(contextlib.nullcontext, self._timeout, f"{self._name}, the partner for {what}"):
            if work is not None:
                work.wait()
            settle(self._device)


class StoreLink:
    """A rank's store on the host, for what leaves and comes as between partners.

    Args:
        store: the store.
        device: where storages lie.
        transferred: is told what comes and goes.
    """

    def __init__(
        self, store: HostStore, device: torch.device, transferred: TransferredBytes
    ) -> None:
        self._store, self._device, self._transferred = store, device, transferred

    def leave(self, storages: list[Tensor], what: str) -> list[Any]:
        """Store them; empties the list as they leave. The tickets to have them back with."""
        storages.reverse()
        tickets = []
        while storages:
            tickets.append(self._store.put(storages[-1]))
            self._transferred.change(-storages.pop().numel())
        return tickets

    def come(
        self, sizes: Sequence[int], tickets: list[Any], what: str, found: list[Tensor]
    ) -> None:
        """Have them back in a list, in which each is from when there is room for it."""
        for size, ticket in zip(sizes, tickets, strict=True):
            self._transferred.change(size)
            found.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            self._store.take(ticket, found[-1])
