"""What ranks leave for each other in a store: which process each is, how it left, what ended a run.

The process that serves the store may end before they do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from torch.distributed.distributed_c10d import Store


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


@dataclass(frozen=True, slots=True)
class Fault:
    """What ended a run.

    Attributes:
        rank: the rank that it happened to.
        where: what that rank was doing: an action such as ``1F2``, or a phase in words.
        error: type and message.
        trace: that rank's traceback; empty for a lost peer.
        lost: True when the rank only lost a peer and nobody said why.
        ended: True when others say it of the rank, which died, left or hangs.
        left: True when it ended as if all were well.
    """

    rank: int
    where: str
    error: str
    trace: str = ""
    lost: bool = False
    ended: bool = False
    left: bool = False

    @classmethod
    def of(cls, rank: int, where: str, error: BaseException, trace: TracebackType | None) -> Fault:
        """A rank's own error, with its traceback from some frame on."""
        text = "".join(traceback.format_exception(type(error), error, trace))
        return cls(rank, where, describe_error(error), text)

    @property
    def headline(self) -> str:
        """One line: who, where, what."""
        if self.lost or self.ended:
            return f"rank {self.rank} {self.error}"
        return f"rank {self.rank} failed in {self.where}: {self.error}"

    @property
    def report(self) -> str:
        """The headline and the traceback of the rank that failed."""
        return f"{self.headline}\n{self.trace}".rstrip()


RETURNED = "came to the end of its program"
_FAULT = "autosplit/fault"


class Board:
    """Where ranks leave word; of faults only the first one stays."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[int, Process] = {}

    def post(self, fault: Fault) -> Fault:
        """Post ``fault`` unless there is one already; returns the one that stands."""
        text = json.dumps(asdict(fault))
        with contextlib.suppress(RuntimeError):
            text = self._store.compare_set(_FAULT, "", text).decode()
        return Fault(**json.loads(text))

    def first(self) -> Fault | None:
        """The fault that stands, if any."""
        text = self._read(_FAULT)
        return Fault(**json.loads(text)) if text else None

    def put(self, what: str, rank: int, text: str) -> None:
        """Leave word."""
        with contextlib.suppress(RuntimeError):
            self._store.set(_key(what, rank), text)

    def get(self, what: str, rank: int) -> str:
        """What a rank left; empty if it did not."""
        return self._read(_key(what, rank))

    def enter(self, rank: int, process: Process) -> None:
        """Say which process a rank is."""
        self.put("process", rank, json.dumps(asdict(process)))

    def process(self, rank: int) -> Process | None:
        """Which process a rank is, once it has said so."""
        if rank not in self._known and (text := self.get("process", rank)):
            self._known[rank] = Process(**json.loads(text))
        return self._known.get(rank)

    def ending(self, rank: int) -> str:
        """How a rank ended, in words: its own, else those of its process; empty: it did not."""
        process = self.process(rank)
        return self.get("words", rank) or (process and process.ending()) or ""

    def _read(self, key: str) -> str:
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                return self._store.get(key).decode()
        return ""


def _key(what: str, rank: int) -> str:
    return f"autosplit/rank {rank}/{what}"


def describe_error(error: BaseException) -> str:
    """Type and message of an error, as the last line of its traceback has them."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
