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
from collections.abc import Callable, Collection, Iterator, Sequence
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

from .groups import Groups, lost


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
    """Of a rank whose stages are on ``device``; on an accelerator the host's time is not noted,
    for it runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = device.type == "cpu"
        self._leaving: deque[float] = deque(maxlen=_NOTED)
        self._coming: deque[float] = deque(maxlen=_NOTED)

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Around what sets off a departure."""
        begun = perf_counter()
        yield
        self._leaving.append(perf_counter() - begun)

    @contextlib.contextmanager
    def coming(self) -> Iterator[None]:
        """Around what puts back what came."""
        begun = perf_counter()
        yield
        self._coming.append(perf_counter() - begun)

    def costs(self) -> MoveCosts:
        """The medians; nothing of what has not been seen."""
        if not self._counts:
            return MoveCosts()
        return MoveCosts(
            *(statistics.median(noted or [0.0]) for noted in (self._leaving, self._coming))
        )


class RunningMove:
    """One move of a step, from where its rank starts it until it has ended.

    Attributes:
        action: the move.
        by_host: whether it depends on this rank's host alone, and not on another rank.
    """

    def __init__(self, action: Action, by_host: bool) -> None:
        self.action = action
        self.by_host = by_host
        self._started = perf_counter()
        self._ended = 0.0
        self._result: Future[Any] = Future()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._result.done()

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.over and self._result.exception() is not None

    def result(self, timeout: float | None = None) -> Any:
        """What came of it; waits for that.

        Raises:
            TimeoutError: it takes longer.
        """
        return self._result.result(timeout)

    def run(self, work: Callable[[], Any]) -> None:
        """Be what ``work`` does."""
        try:
            found = work()
        except BaseException as error:
            self._ended = perf_counter()
            self._result.set_exception(error)
        else:
            self._ended = perf_counter()
            self._result.set_result(found)

    def span(self, rank: int) -> Span:
        """When that was."""
        return Span(rank, self.action, self._started, self._ended)


class Lane:
    """A thread, and on an accelerator a stream, that carries one transfer after another.

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

    def carry(self, transfer: RunningMove, work: Callable[[], Any]) -> RunningMove:
        """Do ``work`` when all before it is done, and behind what the device was given so far."""
        given = done_so_far(self._device)
        noting = self.counted and self._device.type == "cpu"

        def run() -> None:
            sizes = sizes_known() if noting else contextlib.nullcontext()
            with self._stream.behind(given), torch.inference_mode(False), sizes:
                transfer.run(work)

        self._pool.submit(run)
        return transfer


_LANE = "memory"


def partner_pairs(schedule: Schedule) -> set[tuple[int, int]]:
    """The pairs of ranks, the lower one first, between which storages travel."""
    ends = [(each.rank, each.partner) for each in journeys_of(schedule) if each.partner is not None]
    return {(min(pair), max(pair)) for pair in ends}


def connect_partners(groups: Groups, pairs: Collection[tuple[int, int]]) -> None:
    """Make ready for storages between these pairs; collective over all ranks.

    Raises:
        LostPeerError: some rank did not take part.
    """
    groups.connect(pairs, _LANE)


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
        self._out = groups.between(groups.rank, partner, _LANE)
        self._in = groups.between(partner, groups.rank, _LANE)

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
        start = perf_counter()
        try:
            if work is not None:
                work.wait()
            settle(self._device)
        except RuntimeError as error:
            name = f"{self._name}, the partner for {what}"
            raise lost(name, perf_counter() - start, self._timeout, error) from error
