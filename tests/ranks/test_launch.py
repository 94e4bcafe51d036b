"""The local launcher: results, first causes, and no process left behind."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from autosplit.errors import PipelineError, ScheduleError
from autosplit.ranks import launch as launching
from autosplit.ranks.default_group import process_group
from autosplit.ranks.launch import Failure, first_cause, launch
from tests.interpreters import Servers, rank_processes
from tests.pipeline import workers
from tests.ranks import sockets
from tests.ranks.processes import alive, assert_gone, pids_in


def test_results_come_by_rank_from_a_real_process_group(launched: list[dict[str, Any]]) -> None:
    environment = "RANK={0} LOCAL_RANK={0} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1"
    assert [rank["identity"] for rank in launched] == [
        (3 * rank, 1, environment.format(rank), 2) for rank in (0, 1)
    ]


def test_same_function_under_torchrun(under_torchrun: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(under_torchrun):
        product, total, environment, _ = result["identity"]
        assert (product, total) == (3 * rank, 1)
        assert environment.startswith(f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 ")


def test_a_function_that_no_process_can_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook."""

    def train() -> None: ...

    train.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with pytest.raises(PipelineError, match=r"notebook.*`from train import train` and launch"):
        launch(train, 2, timeout=1)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that begin with what takes longest to import."""
    monkeypatch.setattr(launching, "get_context", lambda method: rank_processes())


def test_a_program_that_is_piped_in_launches_what_a_file_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = ModuleType("__main__")
    main.__file__ = "<stdin>"
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert launch(os.getppid, 1, timeout=100)
    assert main.__file__ == "<stdin>"


@pytest.mark.usefixtures("quick")
def test_a_function_under_the_main_guard_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def guarded() -> None: ...

    guarded.__module__, guarded.__qualname__ = "__main__", "guarded"
    monkeypatch.setattr(sys.modules["__main__"], "guarded", guarded, raising=False)
    monkeypatch.setattr(launching, "_is_file", lambda main: True)
    with pytest.raises(PipelineError, match=r"'guarded' .*define it at the top of the module"):
        launch(guarded, 1, timeout=100)


@pytest.mark.usefixtures("quick")
def test_the_first_cause_is_raised_and_nobody_is_left(tmp_path: Path) -> None:
    started = time.monotonic()
    text = r"^rank 1 failed: ValueError: bad weather\nTraceback (.|\n)*in _raise"
    with pytest.raises(PipelineError, match=text):
        launch(workers.fail, 2, (tmp_path, "raise"), timeout=200)
    assert time.monotonic() - started < 100
    assert_gone(tmp_path, 2)


@pytest.mark.usefixtures("quick")
def test_timeout_names_the_ranks_that_are_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is up when both ranks sleep, however long they take to start."""
    calls = itertools.count()

    def monotonic() -> float:
        if next(calls) == 0:
            return 0.0
        return 60.0 if len(pids_in(tmp_path)) == 2 else 59.9

    monkeypatch.setattr(launching, "time", SimpleNamespace(monotonic=monotonic))
    with pytest.raises(PipelineError, match=r"^ranks 0, 1 did not end within 60 s: increase "):
        launch(workers.fail, 2, (tmp_path, "sleep"), timeout=60)
    assert_gone(tmp_path, 2)


def parent(folder: Path, servers: Servers) -> None:
    """Launch ranks that do not end by themselves."""
    servers.join()
    # Background jobs of a shell ignore it, and the server of ranks may block it as ranks do.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    vars(launching)["get_context"] = lambda method: rank_processes()
    launch(workers.fail, 2, (folder, "sleep"), timeout=300)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    process = rank_processes().Process(target=parent, args=(tmp_path, Servers.running()))
    process.start()
    try:
        _wait(lambda: len(pids_in(tmp_path)) == 2)
        os.kill(process.pid or 0, number)
        process.join(60)
        assert process.exitcode
    finally:
        process.kill()
        process.join()
    _wait(lambda: not any(alive(pid) for pid in pids_in(tmp_path)))
    assert len(pids_in(tmp_path)) == 2


def test_launch_listens_on_loopback_only(launched: list[dict[str, Any]]) -> None:
    for local in (*(rank["rank"] for rank in launched), launched[0]["parent"]):
        assert local
        assert all(map(sockets.loopback, local)), local


def test_ranks_of_one_machine_under_torchrun_listen_on_loopback_only(
    under_torchrun: list[dict[str, Any]],
) -> None:
    for rank in under_torchrun:
        assert rank["rank"]
        assert all(map(sockets.loopback, rank["rank"])), rank


def test_a_function_that_cannot_be_sent_is_refused_before_ranks_start() -> None:
    with pytest.raises(PipelineError, match=r"cannot send <function .*top of a module"):
        launch(lambda: None, 2, timeout=60)
    with pytest.raises(PipelineError, match="nprocs must be at least 1; got 0"):
        launch(workers.identify, 0, (3,), timeout=60)


def test_process_group_needs_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with (
        pytest.raises(PipelineError, match=r"no rank .*start it with torchrun, or use "),
        process_group(),
    ):
        pass


def test_first_cause_is_the_earliest_that_is_no_consequence() -> None:
    closed = RuntimeError("Connection closed by peer [127.0.0.1]:1")
    failures = [
        Failure("consequence", 1.0, True),
        Failure("late", 3.0, False),
        Failure("early", 2.0, False),
    ]
    assert first_cause(failures).report == "early"
    assert first_cause(failures[:1]).report == "consequence"
    assert Failure.of_error(0, closed).consequence
    assert not Failure.of_error(0, RuntimeError("out of memory")).consequence
    assert Failure.of_death(1, -signal.SIGSEGV).report == "rank 1 was killed by SIGSEGV"
    assert Failure.of_death(1, 3).report == "rank 1 exited with status 3 and no result"
    assert "must do so under if __name__ == '__main__':" in Failure.of_death(1, 1).report


class _UnsendableError(PipelineError):
    """Made of something else than what it says."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"no room on rank {rank}")


def test_a_typed_error_is_kept_where_it_can_be_sent() -> None:
    typed = pickle.loads(pickle.dumps(Failure.of_error(0, ScheduleError("no such schedule"))))
    assert isinstance(typed.error, ScheduleError)
    assert str(typed.error) == "no such schedule"
    for error in (_UnsendableError(1), RuntimeError("out of memory")):
        failure = pickle.loads(pickle.dumps(Failure.of_error(0, error)))
        assert failure.error is None
        assert str(error) in failure.report


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("waited 60 s in vain")
        time.sleep(0.02)
