"""Runs one side of a case on ranks of its own, and says what came of it."""

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
from dataclasses import dataclass
from typing import Any

from .case import ABSENT, FAILS, RIGHT, Absent, Case, Claim

# Ranks that wait for one that has failed say nothing more of interest.
_GRACE = 1.0
_LOOK_EVERY = 0.05


@dataclass(frozen=True)
class Outcome:
    """What one side did.

    Attributes:
        state: right, fails, or cannot be rebuilt here.
        text: what was seen: a result, the first line of an error, a hang, or the reason.
        claimed: whether that is what the case claims.
    """

    state: str
    text: str
    claimed: bool


def judge(case: Case, side: str, version: tuple[int, ...], timeout: float) -> Outcome:
    """Run a side and compare it with the claim.

    Args:
        case: which.
        side: ``"stock"`` or ``"ours"``.
        version: of torch.
        timeout: seconds after which ranks that still run hang.
    """
    run = case.stock if side == "stock" else case.ours
    if isinstance(run, Absent):
        return Outcome(ABSENT, run.reason, True)
    with tempfile.TemporaryDirectory() as folder:
        state, text = _run(case, side, pathlib.Path(folder), timeout)
    return Outcome(state, text, case.claims(side, version).holds(state, text))


def _run(case: Case, side: str, folder: pathlib.Path, timeout: float) -> tuple[str, str]:
    port = str(_free_port())
    files = [folder / f"{rank}.json" for rank in range(case.ranks)]
    ranks = []
    try:
        for rank, file in enumerate(files):
            command = [sys.executable, "-m", f"{__package__}.rank", case.name, side, str(file)]
            log = (folder / f"{rank}.log").open("w")
            environment = os.environ | _place(rank, case.ranks, port)
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            log.close()
        _wait(ranks, files, timeout)
        return _verdict(ranks, files, timeout)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _place(rank: int, count: int, port: str) -> dict[str, str]:
    """What torchrun would tell a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _wait(ranks: list[subprocess.Popen[bytes]], files: list[pathlib.Path], timeout: float) -> None:
    """Until all have ended, one has failed, or it takes too long."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and any(process.poll() is None for process in ranks):
        if any(process.returncode for process in ranks) or any(
            found["state"] == FAILS for found in _read(files)
        ):
            end = min(end, time.monotonic() + _GRACE)
        time.sleep(_LOOK_EVERY)


def _verdict(
    ranks: list[subprocess.Popen[bytes]], files: list[pathlib.Path], timeout: float
) -> tuple[str, str]:
    """The first failure; else a death; else a hang; else what came out right."""
    found = sorted(_read(files), key=lambda each: float(each["at"]))
    for each in found:
        if each["state"] == FAILS:
            return FAILS, each["text"]
    for rank, (process, file) in enumerate(zip(ranks, files, strict=True)):
        status = process.poll()
        if status and not file.exists():
            return FAILS, f"rank {rank} {_death(status, file.with_suffix('.log'))}"
    if len(found) < len(files):
        return FAILS, f"hangs: {len(files) - len(found)} of {len(files)} ranks wait {timeout:g} s"
    return RIGHT, max((each["text"] for each in found), key=len)


def _death(status: int, log: pathlib.Path) -> str:
    if status < 0:
        return f"is killed by {signal.Signals(-status).name}"
    lines = log.read_text().strip().splitlines()
    return f"ends with status {status}: {lines[-1] if lines else ''}"


def _read(files: list[pathlib.Path]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in files if file.exists()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


__all__ = ["Claim", "Outcome", "judge"]
