"""Each rank watches the others, and finds ranks that have died, left or are stuck.

Communication errors say only that a connection is closed, or that a wait timed out; and a rank that
compiles, or waits for a healthy rank, gets no error at all. So each rank has a thread that, a few
times a second, writes the rank's activity into the shared store and checks the processes of its
machine. If there is a fault, the thread ends the waits of its rank.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from autosplit.ranks.fault_store import CLEAN_EXIT, RETURNED, Fault, FaultStore, Process
from autosplit.ranks.first_error import LostPeerError, RankActivity
from autosplit.ranks.groups import Groups

_BEAT = 0.25
# A rank without a beat for this long is silent; a busy machine may be late.
_SILENCE = 4 * _BEAT
# A rank that loses a peer looks for the cause for this long. A wait that times out closes the
# connections of its rank, which only then looks for silent ranks: leave it time to post the fault.
_PATIENCE = 3 * _SILENCE
_JOIN = 2.0

_CHECK_EVERY = 0.02
ALIKE = (
    "every rank must make the same calls of a trainer; have loops and data loaders of all ranks "
    "one length?"
)
_ANY_LEFT = ("left", -1)  # written when any rank leaves


class Pulse(NamedTuple):
    """A rank's heartbeat.

    Attributes:
        beat: the number of the heartbeat.
        time: seconds since the epoch, by the clock of the rank's machine.
        phase: the phase of the rank's activity.
        activity: the action, or the phase outside of actions, as text.
        seconds: the time since the activity last changed.
        waiting: whether the rank waits for other ranks.
    """

    beat: int
    time: float
    phase: str
    activity: str
    seconds: float
    waiting: bool


class PeerWatch:
    """Sends a rank's heartbeat, and watches the heartbeats of the other ranks.

    Args:
        rank: this rank.
        ranks: the number of ranks.
        stores: two connections to the trainer's store, one for the training thread and one for the
            watch's thread.
        exits: the store into which each rank's program writes how it ended; None without such a
            store.
        activity: the present activity of this rank.
        sever: a function that ends this rank's waits for other ranks.

    Attributes:
        missing: the fault of a rank that no longer takes part; None if all ranks take part.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        stores: tuple[Store, Store],
        exits: Store | None,
        activity: RankActivity,
        sever: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._peers = [peer for peer in range(ranks) if peer != rank]
        self._own_faults, self._faults = map(FaultStore, stores)
        self._exits = None if exits is None else FaultStore(exits)
        self._activity = activity
        self._sever = sever
        self._exited: set[int] = set()
        self.missing: Fault | None = None
        # The training thread beats, too, when it announces a phase.
        self._beat_lock = threading.Lock()
        self._beats = 0
        self._turn, self._since = -1, 0.0
        self._stopping = threading.Event()
        self._own_faults.register(rank, Process.of(os.getpid()))
        activity.announce = lambda: self._beat(self._own_faults)
        self._thread = threading.Thread(target=self._run, name="autosplit-watch", daemon=True)
        self._thread.start()

    def leave(self, how: str) -> None:
        """Write that this rank no longer takes part, and stop; has no effect after ``stop``."""
        if self._stopping.is_set():
            return
        self._own_faults.write_entry("left", self._rank, how)
        self._own_faults.write_entry(*_ANY_LEFT, "yes")
        self.stop()

    def stop(self) -> None:
        """Stop watching the other ranks, and end the watch's thread."""
        self._stopping.set()
        self._activity.announce = lambda: None
        if self._thread is not threading.current_thread():  # which may collect garbage
            self._thread.join(_JOIN)

    def explain(self, error: LostPeerError) -> Fault | None:
        """Find why other ranks do not answer, post it, and return the fault that all ranks report;
        None if the cause is unknown.
        """
        deadline = time.monotonic() + (0.0 if error.waited else _PATIENCE)
        while True:
            fault = self._faults.first() or self._ended()
            if fault is not None or time.monotonic() > deadline:
                break
            time.sleep(_CHECK_EVERY)
        if fault is None and error.waited:
            fault = self._stuck(error.waited)
        return None if fault is None else self._faults.post(fault)

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        self._beat(self._faults)
        while not self._stopping.wait(_BEAT):
            self._beat(self._faults)
            exited = {rank for rank in self._peers if self._has_exited(rank)}
            if exited != self._exited or (self.missing is None and self._faults.get(*_ANY_LEFT)):
                self._exited = exited
                self._note_endings()
            died = self.missing is not None and not self.missing.left
            if died or self._faults.first() is not None:
                self._sever()
                return

    def _has_exited(self, rank: int) -> bool:
        """Whether the rank's process has ended; False for a rank of another machine."""
        process = self._faults.process(rank)
        return process is not None and process.ending() is not None

    def _beat(self, faults: FaultStore) -> None:
        with self._beat_lock:  # also around the write: an older pulse never replaces a newer one
            activity, now = self._activity, time.monotonic()
            if activity.turn != self._turn:
                self._turn, self._since = activity.turn, now
            seconds = now - self._since
            self._beats += 1
            state = activity.phase, str(activity), seconds, activity.waiting
            pulse = Pulse(self._beats, time.time(), *state)
            faults.write_entry("pulse", self._rank, json.dumps(pulse))

    def _note_endings(self) -> None:
        """Record a rank that has ended. Post its fault only if the rank died: a rank that left may
        have finished its work.
        """
        fault = self._ended()
        self.missing = fault if fault is None or fault.left else self._faults.post(fault)

    # --- the peers ----------------------------------------------------------------------------

    def _ended(self) -> Fault | None:
        """The fault of a rank that has ended, preferably of one that died; None if no rank has."""
        left = None
        for rank in self._peers:
            how, clean = self._ending(rank)
            if how and clean:
                went_on = f"{how} while rank {self._rank} went on: {ALIKE}"
                left = left or Fault(rank, "", went_on, ended=True, left=True)
            elif how:
                pulse = self._pulse(rank)
                last = "" if pulse is None else pulse.activity
                report = f"{how}, last heard of in {last}" if last else how
                return Fault(rank, last, report, ended=True)
        return left

    def _ending(self, rank: int) -> tuple[str, bool]:
        """Return (how the rank ended, as text, empty if it still runs; whether it ended without an
        error).
        """
        ending = "" if self._exits is None else self._exits.get("ending", rank)
        if ending and ending != RETURNED:
            return ending, False
        if how := self._faults.get("left", rank):
            return how, True
        how = ending or self._faults.ending(rank)
        return how, how in (RETURNED, CLEAN_EXIT)

    def _stuck(self, waited: str) -> Fault | None:
        """The fault of the rank for which others wait: a rank without heartbeats, else the rank
        that has been in one activity the longest.
        """
        first = self._pulses()
        time.sleep(_SILENCE)
        second = self._pulses()
        if (fault := self._ended()) is not None:  # a rank ended meanwhile
            return fault
        mute = [rank for rank in self._peers if rank not in second]
        silent = [r for r, pulse in second.items() if r in first and first[r].beat == pulse.beat]
        if mute or silent:
            rank = mute[0] if mute else min(silent, key=lambda rank: second[rank].time)
            return self._silent(rank, second.get(rank), waited)
        busy = [
            rank
            for rank, pulse in second.items()
            if not pulse.waiting and pulse.seconds >= _SILENCE - _BEAT
        ]
        phase = self._activity.phase
        apart = [rank for rank, pulse in second.items() if pulse.phase != phase]
        if not (busy or apart):
            return None
        rank = max(busy or apart, key=lambda rank: second[rank].seconds)
        pulse, cause = second[rank], "it is stuck, or needs a longer timeout="
        if rank in apart:
            cause = (
                f"rank {self._rank} is in {phase}, and every rank must make the same calls of a "
                f"trainer (one under `if rank == 0:` has no partner); or {cause}"
            )
        # A rank that timed out as well has just begun another activity: do not report it.
        restarted = rank in apart and pulse.seconds < 2 * _SILENCE
        state = f"has been in {pulse.activity} for {pulse.seconds:.3g} s"
        if restarted:
            state = f"is in {pulse.activity}"
        report = f"{state}: {cause}; rank {self._rank} {waited}"
        return Fault(rank, pulse.activity, report, ended=True)

    def _silent(self, rank: int, pulse: Pulse | None, waited: str) -> Fault:
        """The fault of a rank whose heartbeat stopped. ``pulse`` is its last heartbeat; None if
        none ever came.
        """
        activity, duration = "starting", "at all"
        if pulse is not None:
            seconds = max(time.time() - pulse.time, _SILENCE)  # clocks of machines differ
            activity, duration = pulse.activity, f"for {seconds:.3g} s"
        return Fault(
            rank,
            activity,
            f"has not answered {duration}, last in {activity}: it was stopped, cut off, or holds "
            f"the interpreter; rank {self._rank} {waited}",
            ended=True,
        )

    def _pulses(self) -> dict[int, Pulse]:
        pulses = {rank: self._pulse(rank) for rank in self._peers}
        return {rank: pulse for rank, pulse in pulses.items() if pulse is not None}

    def _pulse(self, rank: int) -> Pulse | None:
        """The last heartbeat of a rank; None before the first."""
        text = self._faults.get("pulse", rank)
        return Pulse(*json.loads(text)) if text else None


def watch_over(groups: Groups) -> PeerWatch:
    """Watch the ranks of a trainer's process groups; the watch does not keep the groups alive."""
    sever = weakref.WeakMethod(groups.sever)
    world = dist.group.WORLD
    exits = None if world is None else _new_connection(world.get_group_store())
    control = groups.everybody
    stores = (control.store, _new_connection(control.store))

    def sever_if_alive() -> None:
        call = sever()
        if call is not None:
            call()

    return PeerWatch(control.rank, control.ranks, stores, exits, groups.activity, sever_if_alive)


def _new_connection(store: Any) -> Store:
    """Open another connection to the store, because a connection serves one thread at a time."""
    connection: Store = store.clone()
    return connection
