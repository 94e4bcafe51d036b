"""Keep the processes of a run, their exits and the first fault in a store that all ranks share.

The process that serves the store may end before the ranks: reads then return nothing, and writes
have no effect.
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
    """A process that other ranks may look up.

    Attributes:
        namespace: the boot of the machine and the PID namespace that ``pid`` belongs to.
        pid: the process number.
        started: the start time in clock ticks, which tells the process from a later one with the
            same number.
    """

    namespace: str
    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process with this number in this process's namespace."""
        stat = _stat(pid)
        return cls(_pid_namespace(), pid, stat[_STARTED] if stat else "")

    def ending(self) -> str | None:
        """Text on how the process ended; None if it runs, or if the present process cannot look it
        up.
        """
        if not self.started or self.namespace != _pid_namespace():
            return None
        stat = _stat(self.pid)
        if stat is None or stat[_STARTED] != self.started:
            return "ended without a word"  # its parent has collected the exit status
        if stat[_STATE] not in "ZX":
            return None
        code = int(stat[_CODE])
        return describe_exit(-(code & 0x7F) if code & 0x7F else code >> 8)


CLEAN_EXIT = "exited with status 0"


def describe_exit(status: int) -> str:
    """The exit status of a process in words; a negative status is the number of a signal."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


# Fields after the name of the command: those of proc(5) minus three.
_STATE, _STARTED, _CODE = 0, 19, 49


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _pid_namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True, slots=True)
class Fault:
    """The event that ended a run.

    Attributes:
        rank: the rank that failed.
        activity: the activity in which the rank failed: an action such as ``1F2``, or a phase as
            text.
        error: type and message of the error, or text on how the rank ended.
        trace: the traceback on that rank; empty for a lost peer.
        lost: True if the rank only lost a peer, and no rank has reported the cause.
        ended: True if other ranks report that this rank died, left or hangs.
        left: True if the rank ended without an error.
    """

    rank: int
    activity: str
    error: str
    trace: str = ""
    lost: bool = False
    ended: bool = False
    left: bool = False

    @classmethod
    def of(
        cls, rank: int, activity: str, error: BaseException, trace: TracebackType | None
    ) -> Fault:
        """The fault of a rank's own error, with its traceback from the frame ``trace`` on."""
        text = "".join(traceback.format_exception(type(error), error, trace))
        return cls(rank, activity, describe_error(error), text)

    @property
    def headline(self) -> str:
        """The rank, its activity and the error, in one line."""
        if self.lost or self.ended:
            return f"rank {self.rank} {self.error}"
        return f"rank {self.rank} failed in {self.activity}: {self.error}"

    @property
    def full_text(self) -> str:
        """The headline and the traceback of the rank that failed."""
        return f"{self.headline}\n{self.trace}".rstrip()


RETURNED = "came to the end of its program"
_FAULT = "autosplit/fault"


class FaultStore:
    """The first fault of a run, and texts that ranks have written, by rank and entry name, in a
    key-value store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._processes: dict[int, Process] = {}

    def post(self, fault: Fault) -> Fault:
        """Post ``fault`` unless a fault is posted already; return the posted fault."""
        text = json.dumps(asdict(fault))
        with contextlib.suppress(RuntimeError):
            text = self._store.compare_set(_FAULT, "", text).decode()
        return Fault(**json.loads(text))

    def first(self) -> Fault | None:
        """The posted fault; None if there is none."""
        text = self._read(_FAULT)
        return Fault(**json.loads(text)) if text else None

    def write_entry(self, entry: str, rank: int, text: str) -> None:
        """Write an entry of a rank."""
        with contextlib.suppress(RuntimeError):
            self._store.set(_key(entry, rank), text)

    def get(self, entry: str, rank: int) -> str:
        """An entry of a rank; empty if the rank has not written it."""
        return self._read(_key(entry, rank))

    def register(self, rank: int, process: Process) -> None:
        """Write which process runs a rank."""
        self.write_entry("process", rank, json.dumps(asdict(process)))

    def process(self, rank: int) -> Process | None:
        """The process that runs a rank, once it is registered."""
        if rank not in self._processes and (text := self.get("process", rank)):
            self._processes[rank] = Process(**json.loads(text))
        return self._processes.get(rank)

    def ending(self, rank: int) -> str:
        """Text on how a rank ended, from its own entry or else from its process; empty if it
        runs.
        """
        process = self.process(rank)
        return self.get("ending", rank) or (process and process.ending()) or ""

    def _read(self, key: str) -> str:
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                return self._store.get(key).decode()
        return ""


def _key(entry: str, rank: int) -> str:
    return f"autosplit/rank {rank}/{entry}"


def describe_error(error: BaseException) -> str:
    """Type and message of an error, as in the last line of its traceback."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
