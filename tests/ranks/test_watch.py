"""A rank learns the fate of others that cannot report it, in one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from autosplit.pipeline.schedule.schedule import Action
from autosplit.ranks import watch as watch_module
from autosplit.ranks.default_group import await_ending
from autosplit.ranks.fault_store import RETURNED, Fault, FaultStore, Process, describe_exit
from autosplit.ranks.first_error import (
    OUTSIDE_CALLS,
    Guard,
    LostPeerError,
    RankActivity,
    RankError,
)
from autosplit.ranks.watch import ALIKE, PeerWatch, Pulse

CLOSED = LostPeerError("lost the other ranks: Connection closed by peer")
TIMEOUT = LostPeerError("waited 3 s for rank 1: is it stuck?", "waited 3 s for rank 1")


class Ranks:
    """The watches of two ranks, and what they share."""

    def __init__(self) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]  # documented
        self.exits = dist.HashStore()  # type: ignore[attr-defined]
        self.faults = FaultStore(self.store)
        self.activities = [RankActivity(), RankActivity()]
        self.severed: list[int] = []
        self.watches: list[PeerWatch] = []

    def watch(self, rank: int) -> PeerWatch:
        stores = (self.store, self.store)
        activity = self.activities[rank]
        built = PeerWatch(rank, 2, stores, self.exits, activity, lambda: self.severed.append(rank))
        self.watches.append(built)
        return built

    def pretend(self, process: Process) -> None:
        """Another process is rank 1."""
        FaultStore(self.store).register(1, process)

    def last_in(self, phase: str) -> None:
        """It said so before."""
        pulse = Pulse(1, time.time(), phase, phase, 0.0, waiting=False)
        FaultStore(self.store).write_entry("pulse", 1, json.dumps(pulse))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """They beat, and lose patience, twice as fast."""
    for name in ("_BEAT", "_SILENCE", "_PATIENCE"):
        monkeypatch.setattr(watch_module, name, getattr(watch_module, name) / 2)
    built = Ranks()
    yield built
    for watch in built.watches:
        watch.stop()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    code = "import sys; sys.exit(int(sys.stdin.readline()))"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def headline(fault: Fault | None) -> str:
    assert fault is not None
    return fault.headline


def _until(found: list[int]) -> None:
    deadline = time.monotonic() + 30
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)


def test_how_a_process_ended_is_there_until_its_parent_asks(
    child: subprocess.Popen[bytes],
) -> None:
    process = Process.of(child.pid)
    assert process.ending() is None
    assert replace(process, started="1").ending() == "ended without a word"  # a later one
    assert replace(process, namespace="elsewhere").ending() is None
    child.kill()
    deadline = time.monotonic() + 30
    while process.ending() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.ending() == "was killed by SIGKILL"
    child.wait()
    assert process.ending() == "ended without a word"
    assert [describe_exit(3), describe_exit(-11), describe_exit(-100)] == [
        "exited with status 3",
        "was killed by SIGSEGV",
        "was killed by signal 100",
    ]


def test_a_death_is_posted_at_once_and_ends_waits(
    ranks: Ranks, child: subprocess.Popen[bytes]
) -> None:
    ranks.pretend(Process.of(child.pid))
    ranks.last_in("compiling its stages")
    watch = ranks.watch(0)
    time.sleep(0.3)  # until it knows the process
    assert watch.missing is None
    child.kill()
    _until(ranks.severed)
    fault = ranks.faults.first()
    assert headline(fault) == "rank 1 was killed by SIGKILL, last heard of in compiling its stages"
    assert watch.missing == fault
    assert ranks.severed == [0]
    guard = Guard(0, ranks.faults, lambda: None, ranks.activities[0], watch)
    with (
        pytest.raises(RankError, match=r"^rank 1 was .*\nRank 0 lost the other"),
        guard.during("a"),
    ):
        raise CLOSED


def test_a_rank_that_was_gone_before_anybody_met_it(
    ranks: Ranks, child: subprocess.Popen[bytes]
) -> None:
    """A process that its parent has reaped counts as ended at once."""
    ranks.pretend(Process.of(child.pid))
    child.kill()
    child.wait()
    ranks.watch(0)
    _until(ranks.severed)
    assert headline(ranks.faults.first()) == "rank 1 ended without a word"


def _end(child: subprocess.Popen[bytes]) -> None:
    """It exits with status 0, for which nobody has asked yet."""
    assert child.stdin is not None
    child.stdin.write(b"0\n")
    child.stdin.flush()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("words", ["raised ValueError: bad weather", RETURNED])
def test_last_words_say_more_than_the_exit(
    ranks: Ranks, child: subprocess.Popen[bytes], words: str
) -> None:
    ranks.pretend(Process.of(child.pid))
    ranks.last_in(OUTSIDE_CALLS)
    FaultStore(ranks.exits).write_entry("ending", 1, words)
    watch = ranks.watch(0)
    _end(child)
    place = ", last heard of in the code around the trainer"
    ending = f" while rank 0 went on: {ALIKE}" if words == RETURNED else place
    assert headline(watch.explain(CLOSED)) == f"rank 1 {words}{ending}"


def test_a_rank_that_ends_while_others_ask_who_is_stuck(
    ranks: Ranks, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.pretend(Process.of(child.pid))
    watch = ranks.watch(0)
    requested = iter([lambda: _end(child), lambda: None])
    monkeypatch.setattr(watch, "_pulses", lambda: next(requested)() or {})
    assert (
        headline(watch.explain(TIMEOUT))
        == f"rank 1 exited with status 0 while rank 0 went on: {ALIKE}"
    )


def test_a_rank_that_left_is_missed_by_those_who_need_it(ranks: Ranks) -> None:
    watch, other = ranks.watch(0), ranks.watch(1)
    other.leave("closed its trainer")
    deadline = time.monotonic() + 30
    while watch.missing is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ranks.faults.first() is None  # all may be well
    assert ranks.severed == []
    guard = Guard(0, ranks.faults, lambda: None, ranks.activities[0], watch)
    text = rf"^rank 1 closed its trainer while rank 0 went on: {re.escape(ALIKE)}\n"
    with pytest.raises(RankError, match=text), guard.during("a step"):
        guard.check()


def test_the_rank_that_is_busy_is_named_and_not_one_that_waits(ranks: Ranks) -> None:
    watch, _ = ranks.watch(0), ranks.watch(1)
    time.sleep(0.3)
    ranks.activities[1].set_action(Action.parse("1F2"), waiting=True)
    assert watch.explain(TIMEOUT) is None
    ranks.activities[1].set_action(ranks.activities[1].action, waiting=False)
    time.sleep(0.3)
    text = headline(watch.explain(TIMEOUT))
    assert text.startswith("rank 1 has been in 1F2 for ")
    assert text.endswith("longer timeout=; rank 0 waited 3 s for rank 1")


def test_ranks_that_wait_in_different_calls_are_told_both(ranks: Ranks) -> None:
    watch, _ = ranks.watch(0), ranks.watch(1)
    for rank, phase in enumerate(("the forward and backward", "saving a checkpoint")):
        ranks.activities[rank].enter(phase)
        ranks.activities[rank].set_action(None, waiting=True)
    time.sleep(0.3)
    text = headline(watch.explain(TIMEOUT))
    assert text.startswith("rank 1 is in saving a checkpoint: rank 0 is in the forward")
    assert "and backward, and every rank must make the same calls" in text


def test_a_rank_that_waited_as_long_is_not_told_by_what_it_began_since(ranks: Ranks) -> None:
    """Its wait timed out, too, and it looks who is stuck."""
    watch, _ = ranks.watch(0), ranks.watch(1)
    ranks.activities[1].enter("saving a checkpoint")
    time.sleep(0.3)
    assert headline(watch.explain(TIMEOUT)).startswith("rank 1 is in saving a checkpoint: rank 0")


def test_a_rank_that_does_not_answer_is_named(ranks: Ranks) -> None:
    watch, other = ranks.watch(0), ranks.watch(1)
    with ranks.activities[1].during("the optimizer step"):
        time.sleep(0.3)
        other.stop()
        text = headline(watch.explain(TIMEOUT))
    assert text.startswith("rank 1 has not answered for ")
    assert " s, last in the optimizer step: it was stopped" in text


def test_a_rank_that_was_stopped_before_it_said_anything_is_named(ranks: Ranks) -> None:
    ranks.pretend(Process.of(os.getpid()))
    expected = "rank 1 has not answered at all, last in starting: it was stopped"
    assert headline(ranks.watch(0).explain(TIMEOUT)).startswith(expected)


def test_await_ending_names_a_rank_that_has_ended(child: subprocess.Popen[bytes]) -> None:
    faults = FaultStore(dist.HashStore())  # type: ignore[attr-defined]
    faults.register(0, Process.of(os.getpid()))
    faults.register(1, Process.of(child.pid))
    assert await_ending(faults, [0, 1], 0.05) == ""
    child.kill()
    assert await_ending(faults, [0, 1], 30.0) == "rank 1 was killed by SIGKILL"
    faults.write_entry("ending", 1, "raised KeyError: 'lr'")
    assert await_ending(faults, [0, 1], 30.0) == "rank 1 raised KeyError: 'lr'"


def test_others_know_an_announced_phase_before_the_next_heartbeat(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "_BEAT", 60)
    watch = ranks.watch(0)
    ranks.watch(1)
    activity = ranks.activities[1]
    pulses = []
    with activity.during("saving a checkpoint", announced=True), activity.during("gathering"):
        pulses.append(watch._pulse(1))
    pulses.append(watch._pulse(1))
    phases = [pulse and pulse.activity for pulse in pulses]
    assert phases == ["saving a checkpoint", OUTSIDE_CALLS]
