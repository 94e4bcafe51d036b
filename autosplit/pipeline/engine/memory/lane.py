"""Transfers in the background, one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

import torch

from autosplit.device import OwnStream, done_so_far
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.simulation.timeline import Span
from autosplit.torch_internals.allocations import sizes_known


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
