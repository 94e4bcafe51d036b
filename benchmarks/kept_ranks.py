"""Ranks that stay: what many calls launch runs in the same processes, one call after another."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from autosplit.errors import PipelineError
from autosplit.ranks.default_group import serve_store
from autosplit.ranks.launch import Failure, Job, Success, first_cause, work

T = TypeVar("T")

_GRACE = 5.0  # seconds for the other ranks to say what they saw


class HungError(PipelineError):
    """Ranks did not end a call in time."""


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    pipe: Connection

    def outcome(self) -> Success | Failure:
        try:
            found: Success | Failure = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(_GRACE)
            return Failure.of_death(self.number, self.process.exitcode)
        return found


def nothing() -> None:
    """Leaves the process as it is."""


class KeptRanks:
    """Calls functions as ``launch`` does: as its ranks, in a process group of their own.

    What starts a process, imports torch and captures for the first time is paid once. Where a
    rank fails or hangs, all are ended; the next call has new ones.

    Args:
        context: starts the processes.
        prepare: what each of them does before each call.
    """

    def __init__(
        self, context: BaseContext | None = None, prepare: Callable[[], None] = nothing
    ) -> None:
        self._context: Any = context or get_context("spawn")
        self._prepare = prepare
        self._ranks: list[_Rank] = []

    def __call__(
        self,
        fn: Callable[..., T],
        nprocs: int,
        args: Sequence[Any] = (),
        *,
        timeout: float,
        threads: int | None = 1,
    ) -> list[T]:
        """What ``fn(*args)`` returns on each of ``nprocs`` ranks.

        Raises:
            HungError: a rank did not end within ``timeout`` seconds.
            PipelineError: a rank raised or died.
        """
        store = serve_store(timeout)
        job = Job(pickle.dumps((fn, tuple(args))), nprocs, store.port, timeout, threads)
        while len(self._ranks) < nprocs:
            self._ranks.append(self._started(len(self._ranks)))
        ranks = self._ranks[:nprocs]
        for rank in ranks:
            rank.pipe.send(job)
        found = _outcomes(ranks, time.monotonic() + timeout)
        failures = [each for each in found.values() if isinstance(each, Failure)]
        if failures or len(found) < nprocs:
            if not failures:
                _abort(rank.process for rank in ranks if rank.number not in found)
            self.end()
            if failures:
                raise PipelineError(first_cause(failures).report)
            raise HungError(f"ranks {sorted(found)} of {nprocs} ended within {timeout} s")
        return [found[at].value for at in range(nprocs)]

    def _started(self, number: int) -> _Rank:
        ours, theirs = self._context.Pipe()
        given = number, theirs, self._prepare
        process = self._context.Process(target=_serve, args=given, name=f"rank {number}")
        process.start()
        theirs.close()
        return _Rank(number, process, ours)

    def end(self) -> None:
        """End the processes, which between two calls hold nothing that is to be put away."""
        for rank in self._ranks:
            rank.pipe.close()
            rank.process.kill()
            rank.process.join()
        self._ranks.clear()


def _outcomes(ranks: Sequence[_Rank], deadline: float) -> dict[int, Any]:
    """How each rank ended its call; after a failure, of those that end soon."""
    found: dict[int, Any] = {}
    waiting: dict[Any, _Rank] = {rank.pipe: rank for rank in ranks}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in connection.wait([*waiting], left):
            rank = waiting.pop(pipe)
            found[rank.number] = rank.outcome()
            if isinstance(found[rank.number], Failure):
                deadline = min(deadline, time.monotonic() + _GRACE)
    return found


def _abort(processes: Iterable[BaseProcess]) -> None:
    """End processes that hang; each first writes where its threads are, see ``_serve``."""
    for process in processes:
        os.kill(process.pid or 0, signal.SIGABRT)
        process.join(_GRACE)


def _serve(number: int, pipe: Connection, prepare: Callable[[], None]) -> None:
    """Run one call after another, until the pipe closes."""
    faulthandler.enable()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        prepare()
        work(job, number, pipe)
