"""One rank's watch over the others: who has died, who has left, and who is stuck.

Messages say only that a connection is closed, or that nothing came; and a rank that compiles, or
waits for one that is well, sees nothing at all. So each rank has a thread that says what its rank
is doing and looks after the processes of its machine, a few times a second, and ends the waits of
its own rank when there is a fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .first_error import (
    Board,
    Fault,
    LostPeerError,
    RankActivity,
)
from .groups import Groups


@dataclass(frozen=True, slots=True)
class Process:
    """A process that others may look at.

    Attributes:
        home: the machine and the numbering that ``pid`` is of.
        pid: its number.
        started: when, in the kernel's count; a later process may get the same number.
    """

    home: str
    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """The one with this number, in this process's numbering."""
        stat = _stat(pid)
        return cls(_home(), pid, stat[_STARTED] if stat else "")

    @property
    def near(self) -> bool:
        """Whether this process can look at it."""
        return bool(self.started) and self.home == _home()

    def ending(self) -> str | None:
        """How it ended, in words; None while it runs, and where that cannot be seen."""
        if not self.near:
            return None
        stat = _stat(self.pid)
        if stat is None or stat[_STARTED] != self.started:
            return "ended without a word"  # and its parent has asked how
        if stat[_STATE] not in "ZX":
            return None
        code = int(stat[_CODE])
        return ended(-(code & 0x7F) if code & 0x7F else code >> 8)


QUIETLY = "exited with status 0"


def ended(status: int) -> str:
    """How a process ended, by its exit status; less than 0: by which signal."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


# Behind the name, as proc(5) numbers them less three.
_STATE, _STARTED, _CODE = 0, 19, 49


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _home() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


RETURNED = "came to the end of its program"
_LOOK_EVERY = 0.02


class Register:
    """The entries of all ranks, in a store that may end before they do."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[int, Process] = {}

    def put(self, what: str, rank: int, text: str) -> None:
        """Leave word."""
        with contextlib.suppress(RuntimeError):
            self._store.set(_key(what, rank), text)

    def get(self, what: str, rank: int) -> str:
        """What a rank left; empty if it did not."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([_key(what, rank)]):
                return self._store.get(_key(what, rank)).decode()
        return ""

    def enter(self, rank: int, process: Process) -> None:
        """Say which process a rank is."""
        self.put("process", rank, json.dumps(asdict(process)))

    def process(self, rank: int) -> Process | None:
        """Which process a rank is, once it has said so."""
        if rank not in self._known and (text := self.get("process", rank)):
            self._known[rank] = Process(**json.loads(text))
        return self._known.get(rank)

    def ending(self, rank: int) -> str | None:
        """How a rank ended, in words: its own, else those of its process; None: it did not."""
        process = self.process(rank)
        return self.get("words", rank) or (None if process is None else process.ending())


def await_ending(register: Register, ranks: Iterable[int], seconds: float) -> Iterator[str]:
    """Which of some ranks has ended and how, as soon as one has; nothing if none does in time."""
    others = list(ranks)
    deadline = time.monotonic() + seconds
    while True:
        found = [f"rank {rank} {how}" for rank in others if (how := register.ending(rank))]
        if found or time.monotonic() > deadline:
            yield from found
            return
        time.sleep(_LOOK_EVERY)


def _key(what: str, rank: int) -> str:
    return f"autosplit/rank {rank}/{what}"


_BEAT = 0.25
# A rank that does not beat for so long is silent; a busy machine may be late.
_SILENCE = 4 * _BEAT
# Whoever loses a peer looks this long for what became of it. A wait that times out closes the
# connections of its rank, which only then listens for who is silent: leave it time to say so.
_PATIENCE = 3 * _SILENCE
_JOIN = 2.0

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
        own, watching = stores
        self._own, self._register = Register(own), Register(watching)
        self._words = None if words is None else Register(words)
        self._board = Board(watching)
        self._place = place
        self._cut = cut
        self._over: set[int] = set()
        self._found: Fault | None = None
        self._left: Fault | None = None
        self._beats = 0
        self._turn, self._since = -1, 0.0
        self._stopping = threading.Event()
        self._own.enter(rank, Process.of(os.getpid()))
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
        if self._thread is not threading.current_thread():  # which may collect garbage
            self._thread.join(_JOIN)

    @property
    def missing(self) -> Fault | None:
        """A rank that takes part no more, if one is known."""
        return self._found or self._left

    def explain(self, error: LostPeerError) -> Fault | None:
        """Why other ranks do not answer, with the fault that stands for all; None: unknown."""
        deadline = time.monotonic() + (0.0 if error.waited else _PATIENCE)
        while True:
            fault = self._board.first() or self._found or self._ended()
            if fault is not None or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_EVERY)
        if fault is None and error.waited:
            fault = self._stuck(error.waited)
        return None if fault is None else self._board.post(fault)

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        self._beat()
        while not self._stopping.wait(_BEAT):
            self._beat()
            over = {rank for rank in self._others if rank not in self._over and self._is_over(rank)}
            self._over |= over
            if over or (self._left is None and self._register.get(*_DEPARTED)):
                self._look()
            if self._found is not None or self._board.first() is not None:
                self._cut()
                return

    def _is_over(self, rank: int) -> bool:
        """Whether the process of a rank of this machine has ended."""
        process = self._register.process(rank)
        return process is not None and process.ending() is not None

    def _beat(self) -> None:
        place, now = self._place, time.monotonic()
        if place.turn != self._turn:
            self._turn, self._since = place.turn, now
        seconds = now - self._since
        self._beats += 1
        pulse = Pulse(
            self._beats,
            time.time(),
            place.phase,
            str(place),
            seconds,
            place.waiting,
        )
        self._register.put("pulse", self._rank, json.dumps(pulse))

    def _look(self) -> None:
        """Note who has ended. One that left may have done all it should; a death is posted."""
        fault = self._ended()
        if fault is not None and not fault.left:
            self._found = self._board.post(fault)
        self._left = fault

    # --- what became of the others ------------------------------------------------------------

    def _ended(self) -> Fault | None:
        """A rank that has ended, first one that died."""
        left = None
        for rank in self._others:
            how, quietly = self._ending(rank)
            if how and not quietly:
                pulse = self._pulse(rank)
                last = "" if pulse is None else pulse.place
                return Fault(
                    rank, last, f"{how}, last heard of in {last}" if last else how, ended=True
                )
            if how:
                left = left or self._gone(rank, how)
        return left

    def _ending(self, rank: int) -> tuple[str, bool]:
        """How a rank has ended, empty if it has not, and whether as if all were well."""
        words = "" if self._words is None else self._words.get("words", rank)
        if words and words != RETURNED:
            return words, False
        if how := self._register.get("left", rank):
            return how, True
        how = words or self._register.ending(rank) or ""
        return how, how in (RETURNED, QUIETLY)

    def _gone(self, rank: int, how: str) -> Fault:
        how = f"{how} while rank {self._rank} went on"
        return Fault(rank, "", how, ended=True, left=True)

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
        # One that waits, too, has begun its last wait anew a moment ago.
        so_long = f"has been in {pulse.place} for {pulse.seconds:.3g} s"
        what = so_long if rank in busy else f"is in {pulse.place}"
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
        text = self._register.get("pulse", rank)
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
