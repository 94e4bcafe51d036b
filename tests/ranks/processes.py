"""Which of the spawned processes still run."""

from __future__ import annotations

from pathlib import Path


def pids_in(folder: Path) -> list[int]:
    """Processes that ranks noted in ``folder``."""
    texts = [path.read_text() for path in folder.glob("*.pid")]
    return [int(text) for text in texts if text]


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def assert_gone(folder: Path, count: int) -> None:
    """All ``count`` ranks noted their process and none of them runs."""
    pids = pids_in(folder)
    assert len(pids) == count
    assert not [pid for pid in pids if alive(pid)]
