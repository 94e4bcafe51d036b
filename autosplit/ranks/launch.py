"""Launch the ranks of one machine as processes; return their results, or raise the first error."""

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
from autosplit.ranks.default_group import process_group, serve_store
from autosplit.ranks.fault_store import describe_error, describe_exit
from autosplit.ranks.first_error import RankError

# Messages of Gloo for a peer that is gone: the rank failed because of another rank.
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "Broken pipe",
)


@dataclass(frozen=True, slots=True)
class Success:
    """The return value of a rank's function."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank ended without a result.

    Attributes:
        report: the error with its traceback, naming the rank.
        timestamp: seconds since the epoch.
        consequence: True if the rank failed because another rank had failed.
        died: the rank's number if its process died without a report; else None.
        blamed: another rank, of which this rank reports that it died, left or hangs; None for a
            failure of this rank.
        error: the error that the rank's function raised, if it is typed and can be pickled.
    """

    report: str
    timestamp: float
    consequence: bool
    died: int | None = None
    blamed: int | None = None
    error: AutosplitError | None = None

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> Failure:
        """The failure of a rank whose function raised."""
        if isinstance(error, RankError):
            # The text is the same on all ranks, so any rank's may be shown.
            fault = error.fault
            blamed = fault.rank if fault.ended else None
            return cls(fault.full_text, time.time(), fault.lost, blamed=blamed)
        text = "".join(traceback.format_exception(error)).rstrip()
        consequence = any(message in str(error) for message in _CONSEQUENCES)
        report = f"rank {rank} failed: {describe_error(error)}\n{text}"
        return cls(report, time.time(), consequence, error=_sendable(error))

    @classmethod
    def of_death(cls, rank: int, status: int | None) -> Failure:
        """The failure of a rank whose process died without a report."""
        report = f"rank {rank} {'ended' if status is None else describe_exit(status)}"
        if status is None or status >= 0:
            report += " and no result"
        if status == 1:  # Python failed before the rank could report
            report += (
                ": see the error that it printed. If that is about bootstrapping: each rank "
                "imports the script that calls launch(), which must do so under "
                "if __name__ == '__main__':"
            )
        return cls(report, time.time(), False, died=rank)


def _sendable(error: BaseException) -> AutosplitError | None:
    """The error, if it is typed and survives pickling; else None."""
    if not isinstance(error, AutosplitError):
        return None
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # user-defined pickling may raise anything
        return None
    return error if type(copy) is type(error) and str(copy) == str(error) else None


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The earliest failure that is not a consequence of another. If every failure is a consequence,
    the earliest of all.

    If the chosen rank died, another rank's report about the death is returned, because it says
    more.
    """
    first = min(failures, key=lambda failure: (failure.consequence, failure.timestamp))
    if first.died is None:
        return first
    return next((failure for failure in failures if failure.blamed == first.died), first)


@dataclass(frozen=True)
class Job:
    """A launched function with its arguments, the same for all ranks.

    Attributes:
        call: the pickled function and arguments.
        nprocs: number of ranks.
        port: the port of the store on 127.0.0.1.
        timeout: seconds after which a wait in the default process group fails.
        threads: the number of torch's threads; None for torch's own choice.
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
    """Return (function to call, its arguments).

    Raises:
        PipelineError: this process cannot import them.
    """
    try:
        return pickle.loads(call)
    except AttributeError as error:
        raise PipelineError(
            f"{error}: new processes import the module without the code under "
            'if __name__ == "__main__":; define it at the top of the module'
        ) from error


def _environment(job: Job, rank: int) -> dict[str, str]:
    """The environment variables that torchrun would set.

    TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_USE_AGENT_STORE make ranks use the launcher's store.
    TORCH_DIST_INIT_BARRIER ends torch.distributed.init_process_group with a barrier. Without the
    barrier, a rank whose function returns at once would close connections that other ranks make.
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
    """End this process as soon as its parent has ended."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


T = TypeVar("T")

# After the first failure, the other ranks have this long to end by themselves and report.
_GRACE = 5.0
_CHECK_EVERY = 0.005
# A process has this long to exit after its result, or after the signal to stop.
_LEAVING = 5.0


def launch(
    fn: Callable[..., T],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    timeout: float,
    threads: int | None = 1,
) -> list[T]:
    """Run ``fn(*args)`` in ``nprocs`` new processes, the ranks of one process group.

    The processes have the environment variables of torchrun (``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR`` and so on). The calling process serves their store, so no rank is special. No
    process outlives the call or the calling process. All sockets are local to this machine.

    Args:
        fn: a function at the top of a module, which the new processes import and call.
        nprocs: the number of processes.
        args: the arguments of ``fn``; they must be picklable.
        timeout: seconds for the whole run, and for each wait in the default process group.
        threads: the number of torch's threads per process; None for torch's own choice.

    Returns:
        The return values of ``fn``, by rank.

    Raises:
        PipelineError: a rank raised, died, or still ran after ``timeout`` seconds. The message has
            the traceback of the first cause. The ``__cause__`` is the error that ``fn`` raised, if
            it is an ``AutosplitError`` that has not ended a trainer on all ranks.
    """
    if nprocs < 1:
        raise PipelineError(f"nprocs must be at least 1; got {nprocs}")
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
    """Whether new processes can import the main program, because it is a file."""
    return main.__spec__ is not None or os.path.exists(getattr(main, "__file__", None) or "")


def _check_importable(fn: Callable[..., Any]) -> None:
    """Refuse a function that is defined in a program without a file: new processes cannot import
    it.
    """
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", "") == "__main__" and not _is_file(main):
        name = getattr(fn, "__name__", repr(fn))
        raise PipelineError(
            f"launch() starts new processes, which cannot import {name}: it is defined in a "
            "notebook, an interpreter or a piped program. Write it into a file (in a notebook, a "
            f"cell that begins with %%writefile train.py), then `from train import {name}` and "
            "launch that"
        )


class _Process:
    """One rank and the pipe on which it reports."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection) -> None:
        self.rank = rank
        self.process = process
        self.pipe = pipe
        self.outcome: Success | Failure | None = None

    def read_report(self) -> None:
        """Read the rank's report. A pipe that ends without a report means that the process died."""
        try:
            self.outcome = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.outcome = Failure.of_death(self.rank, self._status())

    def _status(self) -> int | None:
        """The process's exit status. It is read with WNOWAIT, so that the watches of other ranks
        can read it, too.
        """
        if not hasattr(os, "waitid"):
            self.process.join(_LEAVING)
            return self.process.exitcode
        deadline = time.monotonic() + _LEAVING
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while time.monotonic() < deadline:
            result = os.waitid(os.P_PID, self.process.pid or 0, options)
            if result is not None:
                return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            time.sleep(_CHECK_EVERY)
        return None


@contextlib.contextmanager
def _processes(job: Job) -> Iterator[list[_Process]]:
    """Context that starts the ranks, and ends all of them at its end, after errors too."""
    context = get_context("spawn")
    started: list[_Process] = []
    try:
        for rank in range(job.nprocs):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(job, rank, sender), name=f"rank {rank}")
            with _no_piped_program():
                process.start()
            sender.close()
            started.append(_Process(rank, process, receiver))
        yield started
        _join(started)
    finally:
        _end(started)


@contextlib.contextmanager
def _no_piped_program() -> Iterator[None]:
    """Context in which processes that are started do not try to import a main program that was
    piped into Python.

    Such an import would fail. It is not needed: ``_check_importable`` refuses functions of such a
    program.
    """
    main = sys.modules["__main__"]
    path = None if _is_file(main) else vars(main).pop("__file__", None)
    try:
        yield
    finally:
        if path is not None:
            main.__file__ = path


def _collect(processes: list[_Process], deadline: float, timeout: float) -> list[Any]:
    """Wait for every rank's report. After the first failure, wait only a little longer."""
    failures: list[Failure] = []
    while waiting := [process for process in processes if process.outcome is None]:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            break
        for pipe in connection.wait([process.pipe for process in waiting], seconds):
            process = next(process for process in waiting if process.pipe is pipe)
            process.read_report()
            if isinstance(process.outcome, Failure):
                failures.append(process.outcome)
                deadline = min(deadline, time.monotonic() + _GRACE)
    if failures:
        first = first_cause(failures)
        raise PipelineError(first.report) from first.error
    if waiting:
        ranks = ", ".join(str(process.rank) for process in waiting)
        raise PipelineError(
            f"{'rank' if len(waiting) == 1 else 'ranks'} {ranks} did not end within {timeout:.3g} "
            "s: increase timeout=; to see which rank waits for which, give RunOptions(timeout=) "
            "a smaller value than launch(timeout=)"
        )
    outcomes = (process.outcome for process in processes)
    return [outcome.value for outcome in outcomes if isinstance(outcome, Success)]


def _join(processes: list[_Process]) -> None:
    deadline = time.monotonic() + _LEAVING
    for rank in processes:
        rank.process.join(max(0.0, deadline - time.monotonic()))


def _end(processes: list[_Process]) -> None:
    for rank in processes:
        rank.pipe.close()
        if rank.process.is_alive():
            rank.process.terminate()
            if hasattr(signal, "SIGCONT"):  # a stopped process receives no other signal
                os.kill(rank.process.pid or 0, signal.SIGCONT)
    _join(processes)
    for rank in processes:
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join()
        rank.process.close()
