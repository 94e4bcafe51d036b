"""Runs one fault and looks at what is left."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from autosplit.errors import PipelineError
from autosplit.pipeline import launch

from . import subject
from .cells import CAUSES, SILENT, Cell

# A rank that lives on is given so long to end.
_LIMIT = 120.0
_CACHE = "torchinductor_"
_SHARED = pathlib.Path("/dev/shm")
_LONG = 60.0


@dataclass
class Finding:
    """What came of one fault.

    Attributes:
        named: survivors that said the rank and the cause.
        silent: survivors that their launcher ended before they said anything.
        wrong: what other survivors said.
        seconds: from the fault to the last that said so; with the timeout, where that must pass.
        alive: ranks that ran on.
        left: what was left behind.
        told: whether the launcher named both; None: it is not one of ours.
    """

    named: int = 0
    silent: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    alive: int = 0
    left: list[str] = field(default_factory=list)
    told: bool | None = None

    @property
    def good(self) -> bool:
        """Whether all is as it should be."""
        return not (self.wrong or self.alive or self.left or self.told is False)


def judge(cell: Cell, timeout: float) -> Finding:
    """Run a cell.

    Args:
        cell: what happens.
        timeout: of the trainer, in seconds, where it has to pass.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        temporary = folder / "tmp"
        temporary.mkdir()
        before = _shared()
        said = _run(cell, folder, temporary, timeout if cell.fault in SILENT else _LONG)
        notes = {
            int(path.stem): json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")
        }
        found = _survivors(cell, notes, json.loads((folder / "fault.json").read_text()))
        found.told = None if said is None else names(cell, said)
        pids = [note["pid"] for note in notes.values()]
        found.alive = sum(not _gone(pid) for pid in pids)
        files = [each.name for each in temporary.iterdir() if not each.name.startswith(_CACHE)]
        found.left = [*_behind(before, pids), *files]
        if _answers(notes[0]["port"]):
            found.left.append(f"port {notes[0]['port']}")
        return found


def names(cell: Cell, text: str) -> bool:
    """Whether a message says the rank and the cause."""
    return f"rank {cell.victim} " in text and any(each in text for each in CAUSES[cell.fault])


def _survivors(cell: Cell, notes: dict[int, dict[str, Any]], when: float) -> Finding:
    found = Finding()
    for rank in range(cell.ranks):
        if rank == cell.victim:
            continue
        text = notes.get(rank, {}).get("said")
        if text is None:
            # The agent of torchrun ends all ranks as soon as it has seen one end.
            if cell.launcher == "torchrun" and cell.fault not in SILENT:
                found.silent += 1
            else:
                found.wrong.append(f"rank {rank} said nothing")
        elif names(cell, text):
            found.named += 1
            found.seconds = max(found.seconds, notes[rank]["at"] - when)
        else:
            found.wrong.append(f"rank {rank}: {text.splitlines()[0] if text else 'no error'}")
    return found


def _run(cell: Cell, folder: pathlib.Path, temporary: pathlib.Path, timeout: float) -> str | None:
    """Run all ranks to their end; what ``launch`` raised, None under torchrun."""
    os.environ["TMPDIR"] = str(temporary)  # for the ranks
    os.environ["OMP_NUM_THREADS"] = "1"
    if cell.launcher == "launch":
        try:
            launch(subject.rank, cell.ranks, (cell, str(folder), timeout), timeout=_LIMIT)
        except PipelineError as error:
            return str(error)
        return ""
    arguments = [cell.fault, cell.place, str(cell.ranks), str(folder), str(timeout)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--log-dir={folder}/logs"]  # its own, which it leaves where it likes
    command += [f"--nproc-per-node={cell.ranks}", "-m", "benchmarks.faults.subject", *arguments]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True) as process:
        try:
            process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    return None


def _gone(pid: int) -> bool:
    """Whether a process has ended; one that runs on is killed."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


def _shared() -> set[str]:
    return {path.name for path in _SHARED.iterdir()} if _SHARED.exists() else set()


def _behind(before: set[str], pids: list[int]) -> list[str]:
    """Shared memory of these processes: torch names it by them."""
    return [each for each in _shared() - before if any(str(pid) in each for pid in pids)]


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def row(cell: Cell, timeout: float) -> dict[str, Any]:
    """What came of a cell, as it is written."""
    finding = judge(cell, timeout)
    return {
        "name": cell.name,
        "ranks": cell.ranks,
        "waits": cell.fault in SILENT,
        "timeout": timeout,
        "good": finding.good,
        **asdict(finding),
    }


if __name__ == "__main__":
    print(json.dumps(row(Cell(**json.loads(sys.argv[1])), float(sys.argv[2]))))
