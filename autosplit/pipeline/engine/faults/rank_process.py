"""Which process a rank is, and how it ended, for ranks of the same machine."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path


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

    def opened(self) -> int | None:
        """A file descriptor that becomes readable when it ends; None where there is none."""
        if not self.near or not hasattr(os, "pidfd_open"):
            return None
        try:
            return os.pidfd_open(self.pid)
        except OSError:  # it is gone, or the kernel is too old
            return None


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
