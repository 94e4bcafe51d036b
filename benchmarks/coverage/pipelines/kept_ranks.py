"""Ranks that stay: what takes long to import is imported once."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.default_group import serve_store
from autosplit.pipeline.engine.launch import Failure, Job, first_cause, work

T = TypeVar("T")

_GRACE = 20.0  # seconds for the others, once one has ended its call with an error


class HungError(Exception):
    """Ranks did not end a call in time."""


class KeptRanks:
    """Calls functions as ``launch`` does, in processes that stay.

    Where a rank raises, dies or hangs, all are ended, and the next call has new ones.

    Args:
        count: how many ranks.
        calls: after so many, the processes are replaced, with all that they have kept.
    """

    def __init__(self, count: int, calls: int) -> None:
        self._count = count
        self._calls = calls
        self._left = 0
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def __call__(self, fn: Callable[..., T], args: Sequence[Any], limit: float) -> list[T]:
        """What ``fn(*args)`` returns on each rank.

        Raises:
            HungError: after ``limit`` seconds.
            PipelineError: a rank raised or died.
        """
        if not self._left:
            self.end()
            self._ranks = [_started(number) for number in range(self._count)]
            self._left = self._calls
        self._left -= 1
        store = serve_store(limit)
        call = pickle.dumps((fn, tuple(args)))
        for _, pipe in self._ranks:
            pipe.send(Job(call, self._count, store.port, limit, 1))
        try:
            return self._results(time.monotonic() + limit)
        except BaseException:
            self.end()
            raise

    def _results(self, deadline: float) -> list[Any]:
        found: dict[int, Any] = {}
        numbers = {pipe: number for number, (_, pipe) in enumerate(self._ranks)}
        while len(found) < self._count:
            waiting = [pipe for pipe, number in numbers.items() if number not in found]
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                number = numbers[pipe]  # type: ignore[index]
                found[number] = self._outcome(number)
                if isinstance(found[number], Failure):
                    deadline = min(deadline, time.monotonic() + _GRACE)
        failures = [each for each in found.values() if isinstance(each, Failure)]
        if failures:
            raise PipelineError(first_cause(failures).report)
        if len(found) < self._count:
            raise HungError(f"ranks {sorted(found)} of {self._count} came to an end")
        return [found[number].value for number in range(self._count)]

    def _outcome(self, number: int) -> Any:
        process, pipe = self._ranks[number]
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process.join(_GRACE)
            return Failure.of_death(number, process.exitcode)

    def end(self) -> None:
        """End the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks.clear()
        self._left = 0


def _started(number: int) -> tuple[BaseProcess, Connection]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(number, theirs), name=f"rank {number}")
    process.start()
    theirs.close()
    return process, ours


def _serve(number: int, pipe: Connection) -> None:
    """Run one call after another, until the pipe closes."""
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        work(job, number, pipe)
