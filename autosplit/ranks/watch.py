"""One rank's watch over the others: who has died, who has left, and who is stuck.

Messages say only that a connection is closed, or that nothing came; and a rank that compiles, or
waits for one that is well, sees nothing at all. So each rank has a thread that says what its rank
is doing and looks after the processes of its machine, a few times a second, and ends the waits of
its own rank when there is a fault.
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

from autosplit.ranks.board import QUIETLY, RETURNED, Board, Fault, Process
from autosplit.ranks.first_error import LostPeerError, RankActivity
from autosplit.ranks.groups import Groups

_BEAT = 0.25
# A rank that does not beat for so long is silent; a busy machine may be late.
_SILENCE = 4 * _BEAT
# Whoever loses a peer looks this long for what became of it. A wait that times out closes the
# connections of its rank, which only then listens for who is silent: leave it time to say so.
_PATIENCE = 3 * _SILENCE
_JOIN = 2.0

_LOOK_EVERY = 0.02
_DEPARTED = ("left", -1)  # any rank


class Pulse(NamedTuple):
    """A rank's heartbeat.

    Attributes:
        beat: counts.
        time: seconds since the epoch.
        phase: of what it is doing.
        place: what it is doing.
        seconds: for how long it is doing that.
        waiting: whether it waits for other ranks.
    """

    beat: int
    time: float
    phase: str
    place: str
    seconds: float
    waiting: bool


class PeerWatch:
    """Sends a rank's heartbeat and watches those of the others.

    Args:
        rank: this rank.
        ranks: how many there are.
        stores: two connections to the store of the trainer, for the thread that trains and for the
            one that watches.
        words: where ranks leave their last words, if not there; None: nowhere.
        place: what this rank is doing.
        cut: ends the waits of this rank for others.

    Attributes:
        missing: a rank that takes part no more, if one is known.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        stores: tuple[Store, Store],
        words: Store | None,
        place: RankActivity,
        cut: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._others = [each for each in range(ranks) if each != rank]
        self._own, self._board = map(Board, stores)
        self._words = None if words is None else Board(words)
        self._place = place
        self._cut = cut
        self._over: set[int] = set()
        self.missing: Fault | None = None
        self._beats = 0
        self._turn, self._since = -1, 0.0
        self._stopping = threading.Event()
        self._own.enter(rank, Process.of(os.getpid()))
        place.announce = lambda: self._beat(self._own)
        self._thread = threading.Thread(target=self._run, name="autosplit-watch", daemon=True)
        self._thread.start()

    def leave(self, how: str) -> None:
        """Say that this rank takes part no more, and stop; nothing where it has stopped."""
        if self._stopping.is_set():
            return
        self._own.put("left", self._rank, how)
        self._own.put(*_DEPARTED, "yes")
        self.stop()

    def stop(self) -> None:
        """Stop watching."""
        self._stopping.set()
        self._place.announce = lambda: None
        if self._thread is not threading.current_thread():  # which may collect garbage
            self._thread.join(_JOIN)

    def explain(self, error: LostPeerError) -> Fault | None:
        """Why other ranks do not answer, with the fault that stands for all; None: unknown."""
        deadline = time.monotonic() + (0.0 if error.waited else _PATIENCE)
        while True:
            fault = self._board.first() or self._ended()
            if fault is not None or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_EVERY)
        if fault is None and error.waited:
            fault = self._stuck(error.waited)
        return None if fault is None else self._board.post(fault)

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        self._beat(self._board)
        while not self._stopping.wait(_BEAT):
            self._beat(self._board)
            over = {rank for rank in self._others if self._is_over(rank)}
            if over != self._over or (self.missing is None and self._board.get(*_DEPARTED)):
                self._over = over
                self._look()
            died = self.missing is not None and not self.missing.left
            if died or self._board.first() is not None:
                self._cut()
                return

    def _is_over(self, rank: int) -> bool:
        """Whether the process of a rank of this machine has ended."""
        process = self._board.process(rank)
        return process is not None and process.ending() is not None

    def _beat(self, board: Board) -> None:
        place, now = self._place, time.monotonic()
        if place.turn != self._turn:
            self._turn, self._since = place.turn, now
        seconds = now - self._since
        self._beats += 1
        pulse = Pulse(self._beats, time.time(), place.phase, str(place), seconds, place.waiting)
        board.put("pulse", self._rank, json.dumps(pulse))

    def _look(self) -> None:
        """Note who has ended. One that left may have done all it should; a death is posted."""
        fault = self._ended()
        self.missing = fault if fault is None or fault.left else self._board.post(fault)

    # --- what became of the others ------------------------------------------------------------

    def _ended(self) -> Fault | None:
        """A rank that has ended, first one that died."""
        left = None
        for rank in self._others:
            how, quietly = self._ending(rank)
            if how and quietly:
                went_on = f"{how} while rank {self._rank} went on"
                left = left or Fault(rank, "", went_on, ended=True, left=True)
            elif how:
                pulse = self._pulse(rank)
                last = "" if pulse is None else pulse.place
                said = f"{how}, last heard of in {last}" if last else how
                return Fault(rank, last, said, ended=True)
        return left

    def _ending(self, rank: int) -> tuple[str, bool]:
        """How a rank has ended, empty if it has not, and whether as if all were well."""
        words = "" if self._words is None else self._words.get("words", rank)
        if words and words != RETURNED:
            return words, False
        if how := self._board.get("left", rank):
            return how, True
        how = words or self._board.ending(rank)
        return how, how in (RETURNED, QUIETLY)

    def _stuck(self, waited: str) -> Fault | None:
        """The rank that others wait for: one that is silent, else the one longest at one thing."""
        first = self._pulses()
        time.sleep(_SILENCE)
        second = self._pulses()
        if (fault := self._ended()) is not None:  # meanwhile
            return fault
        mute = [rank for rank in self._others if rank not in second]
        silent = [r for r, pulse in second.items() if r in first and first[r].beat == pulse.beat]
        if mute or silent:
            rank = mute[0] if mute else min(silent, key=lambda each: second[each].time)
            return self._silent(rank, second.get(rank), waited)
        busy = [
            rank
            for rank, pulse in second.items()
            if not pulse.waiting and pulse.seconds >= _SILENCE - _BEAT
        ]
        own = self._place.phase
        apart = [rank for rank, pulse in second.items() if pulse.phase != own]
        if not (busy or apart):
            return None
        rank = max(busy or apart, key=lambda each: second[each].seconds)
        pulse, cause = second[rank], "it is stuck, or needs a longer timeout="
        if rank in apart:
            cause = (
                f"rank {self._rank} is in {own}, and every rank makes the same calls of a trainer "
                f"(one under `if rank == 0:` has no partner); or {cause}"
            )
        # One that waited, too, has begun to wait anew, or to look who is stuck, a moment ago.
        so_long = f"has been in {pulse.place} for {pulse.seconds:.3g} s"
        anew = rank in apart and pulse.seconds < 2 * _SILENCE
        what = f"is in {pulse.place}" if anew else so_long
        return Fault(rank, pulse.place, f"{what}: {cause}; rank {self._rank} {waited}", ended=True)

    def _silent(self, rank: int, pulse: Pulse | None, waited: str) -> Fault:
        """A rank that does not beat, or never did: it was stopped before it came to that."""
        place, so_long = "starting", "at all"
        if pulse is not None:
            seconds = max(time.time() - pulse.time, _SILENCE)  # of another machine's clock
            place, so_long = pulse.place, f"for {seconds:.3g} s"
        return Fault(
            rank,
            place,
            f"has not answered {so_long}, last in {place}: it was stopped, cut off, or holds the "
            f"interpreter; rank {self._rank} {waited}",
            ended=True,
        )

    def _pulses(self) -> dict[int, Pulse]:
        found = {rank: self._pulse(rank) for rank in self._others}
        return {rank: pulse for rank, pulse in found.items() if pulse is not None}

    def _pulse(self, rank: int) -> Pulse | None:
        """The last of a rank; None before its first."""
        text = self._board.get("pulse", rank)
        return Pulse(*json.loads(text)) if text else None


def watch_over(groups: Groups) -> PeerWatch:
    """PeerWatch over the ranks of a trainer's process groups, which this does not keep alive."""
    cut = weakref.WeakMethod(groups.cut)
    world = dist.group.WORLD
    words = None if world is None else _another(world.get_group_store())
    control = groups.everybody
    stores = (control.store, _another(control.store))

    def cut_if_there() -> None:
        call = cut()
        if call is not None:
            call()

    return PeerWatch(control.rank, control.ranks, stores, words, groups.place, cut_if_there)


def _another(store: Any) -> Store:
    """A connection of its own: one waits while another thread uses it."""
    found: Store = store.clone()
    return found
