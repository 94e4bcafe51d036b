"""Starts the ranks of one machine as processes and brings back their results or first error."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, TypeVar

import torch

from autosplit.errors import AutosplitError, PipelineError
from autosplit.ranks.board import describe_error, ended
from autosplit.ranks.default_group import process_group, serve_store
from autosplit.ranks.first_error import RankError

# What Gloo says when the other end is gone; a rank that says so suffers from another's failure.
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "Broken pipe",
)


@dataclass(frozen=True, slots=True)
class Success:
    """What a rank's function returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a rank that gave no result.

    Attributes:
        report: the whole story, naming the rank.
        when: seconds since the epoch.
        consequence: True when the rank failed because another one had.
        died: the rank, where its process died without a word.
        tells_of: the rank that it tells of, where that is another one, which died, left or hangs.
        error: what the rank's function raised, where that is typed and can be sent.
    """

    report: str
    when: float
    consequence: bool
    died: int | None = None
    tells_of: int | None = None
    error: AutosplitError | None = None

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> Failure:
        """For a rank whose function raised."""
        if isinstance(error, RankError):
            # The same text on all ranks, so it does not matter whose is shown.
            fault = error.fault
            of = fault.rank if fault.ended else None
            return cls(fault.report, time.time(), fault.lost, tells_of=of)
        text = "".join(traceback.format_exception(error)).rstrip()
        consequence = any(each in str(error) for each in _CONSEQUENCES)
        report = f"rank {rank} failed: {describe_error(error)}\n{text}"
        return cls(report, time.time(), consequence, error=_sendable(error))

    @classmethod
    def of_death(cls, rank: int, status: int | None) -> Failure:
        """For a rank whose process died without a word."""
        report = f"rank {rank} {'ended' if status is None else ended(status)}"
        if status is None or status >= 0:
            report += " and no result"
        if status == 1:  # Python's own, before there was anybody to report
            report += (
                ", for the reason that it printed; if that is about bootstrapping: each rank "
                "imports the script that calls launch(), which must do so under "
                "if __name__ == '__main__':"
            )
        return cls(report, time.time(), False, died=rank)


def _sendable(error: BaseException) -> AutosplitError | None:
    """A typed error, if it is the same once it has been pickled."""
    if not isinstance(error, AutosplitError):
        return None
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the error, or what it refers to, raises of its own
        return None
    return error if type(copy) is type(error) and str(copy) == str(error) else None


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The earliest failure that is not the consequence of another one; else the earliest. Of a
    death, what another rank tells says more.
    """
    first = min(failures, key=lambda failure: (failure.consequence, failure.when))
    told = (each for each in failures if first.died is not None and each.tells_of == first.died)
    return next(told, first)


@dataclass(frozen=True)
class Job:
    """A launched function with its arguments, the same for all ranks.

    Attributes:
        call: the pickled function and arguments.
        nprocs: number of ranks.
        port: where the store is served on 127.0.0.1.
        timeout: seconds for a wait in the default process group.
        threads: torch's threads, or None.
    """

    call: bytes
    nprocs: int
    port: int
    timeout: float
    threads: int | None


def work(job: Job, rank: int, pipe: Connection) -> None:
    """Run the job as ``rank`` and report a Success or Failure, pickled, through ``pipe``."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C reaches the whole process group; the parent ends its ranks itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(_environment(job, rank))
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    try:
        fn, args = _loaded(job.call)
        with process_group(job.timeout):
            result = fn(*args)
        message = pickle.dumps(Success(result))
    except BaseException as error:
        message = pickle.dumps(Failure.of_error(rank, error))
    pipe.send_bytes(message)


def _loaded(call: bytes) -> Any:
    """The function to call, and its arguments.

    Raises:
        PipelineError: they are not in what this process imports.
    """
    try:
        return pickle.loads(call)
    except AttributeError as error:
        raise PipelineError(
            f"{error}: new processes import the module, not what is under "
            'if __name__ == "__main__":; define it at the top of the module'
        ) from error


def _environment(job: Job, rank: int) -> dict[str, str]:
    """What torchrun would set. The counts of restarts and the agent's store make ranks use a store
    that is there already. Without the barrier, a rank whose function returns at once closes
    connections that others are still making, which then fail.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(job.nprocs),
        "LOCAL_WORLD_SIZE": str(job.nprocs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_DIST_INIT_BARRIER": "1",
    }


def _end_with_parent() -> None:
    """End this process when its parent is gone, however that came about."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


T = TypeVar("T")

# After the first failure, the others have this long to end by themselves and say what they saw.
_GRACE = 5.0
_LOOK_EVERY = 0.005
# How long a process gets to leave after it gave its result, or after it was asked to stop.
_LEAVING = 5.0


def launch(
    fn: Callable[..., T],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    timeout: float,
    threads: int | None = 1,
) -> list[T]:
    """Run ``fn(*args)`` in ``nprocs`` new processes, each with its rank in a process group.

    The processes see what torchrun would give them (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
    so on), and the store that connects them lives in the calling process, so no rank is special.
    None outlives the call, nor the calling process. No other host reaches their sockets.

    Args:
        fn: a function that the new processes can import, called on every rank.
        nprocs: how many processes.
        args: its arguments; they must be picklable.
        timeout: seconds for the whole run, and for each wait in the default process group.
        threads: torch's threads per process; None leaves torch's own choice.

    Returns:
        What ``fn`` returned on each rank, by rank.

    Raises:
        PipelineError: a rank raised (the message carries its traceback; of several the first
            cause; its ``__cause__`` is an error of autosplit that the function raised by itself,
            not one that ended a step on all ranks), died, or was still running after
            ``timeout`` seconds.
    """
    if nprocs < 1:
        raise PipelineError(f"expected one or more processes, got nprocs={nprocs}")
    _check_importable(fn)
    try:
        call = pickle.dumps((fn, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PipelineError(
            f"cannot send {fn!r} and its arguments to new processes: {error}. Use a function "
            "defined at the top of a module and plain arguments"
        ) from error
    store = serve_store(timeout)
    job = Job(call, nprocs, store.port, timeout, threads)
    with _processes(job) as processes:
        return _collect(processes, time.monotonic() + timeout, timeout)


def _is_file(main: ModuleType) -> bool:
    """Whether new processes can import the program."""
    return main.__spec__ is not None or os.path.exists(getattr(main, "__file__", None) or "")


def _check_importable(fn: Callable[..., Any]) -> None:
    """Refuse a function of a program that is no file: new processes import what they call."""
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", "") == "__main__" and not _is_file(main):
        name = getattr(fn, "__name__", repr(fn))
        raise PipelineError(
            f"launch() starts new processes, which import {name}: they cannot where it is "
            "defined in a notebook, in an interpreter or in a program that is piped in. Write it "
            f"into a file (in a notebook, a cell that begins with %%writefile train.py), then "
            f"`from train import {name}` and launch that"
        )


class _Process:
    """One rank and the pipe on which it reports."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection) -> None:
        self.rank = rank
        self.process = process
        self.pipe = pipe
        self.outcome: Success | Failure | None = None

    def read(self) -> None:
        """Take the report, or find that there is none because the process is dead."""
        try:
            self.outcome = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.outcome = Failure.of_death(self.rank, self._status())

    def _status(self) -> int | None:
        """Its exit status, which stays there for the watches of other ranks to look at."""
        if not hasattr(os, "waitid"):
            self.process.join(_LEAVING)
            return self.process.exitcode
        deadline = time.monotonic() + _LEAVING
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while time.monotonic() < deadline:
            found = os.waitid(os.P_PID, self.process.pid or 0, look)
            if found is not None:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            time.sleep(_LOOK_EVERY)
        return None


@contextlib.contextmanager
def _processes(job: Job) -> Iterator[list[_Process]]:
    """Start the ranks; whatever happens, none is left at the end."""
    context = get_context("spawn")
    started: list[_Process] = []
    try:
        for rank in range(job.nprocs):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(job, rank, theirs), name=f"rank {rank}")
            with _no_piped_program():
                process.start()
            theirs.close()
            started.append(_Process(rank, process, ours))
        yield started
        _join(started, _LEAVING)
    finally:
        _end(started)


@contextlib.contextmanager
def _no_piped_program() -> Iterator[None]:
    """Processes that start meanwhile do not import a program that is piped in, which they cannot,
    and need not for a function of another module.
    """
    main = sys.modules["__main__"]
    path = None if _is_file(main) else vars(main).pop("__file__", None)
    try:
        yield
    finally:
        if path is not None:
            main.__file__ = path


def _collect(processes: list[_Process], deadline: float, timeout: float) -> list[Any]:
    """Wait for every report; at the first failure, only a little longer for the others."""
    failures: list[Failure] = []
    while waiting := [each for each in processes if each.outcome is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        for pipe in connection.wait([each.pipe for each in waiting], left):
            each = next(each for each in waiting if each.pipe is pipe)
            each.read()
            if isinstance(each.outcome, Failure):
                failures.append(each.outcome)
                deadline = min(deadline, time.monotonic() + _GRACE)
    if failures:
        first = first_cause(failures)
        raise PipelineError(first.report) from first.error
    if waiting:
        ranks = ", ".join(str(each.rank) for each in waiting)
        raise PipelineError(
            f"{'rank' if len(waiting) == 1 else 'ranks'} {ranks} did not end within {timeout:.3g} "
            "s: raise timeout=; a shorter RunOptions(timeout=) says who waits for whom"
        )
    return [each.outcome.value for each in processes if isinstance(each.outcome, Success)]


def _join(processes: list[_Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for each in processes:
        each.process.join(max(0.0, deadline - time.monotonic()))


def _end(processes: list[_Process]) -> None:
    for each in processes:
        each.pipe.close()
        if each.process.is_alive():
            each.process.terminate()
            if hasattr(signal, "SIGCONT"):  # a stopped one would not hear of it
                os.kill(each.process.pid or 0, signal.SIGCONT)
    _join(processes, _LEAVING)
    for each in processes:
        if each.process.is_alive():
            each.process.kill()
        each.process.join()
        each.process.close()
