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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .case import ABSENT, FAILS, RIGHT, Absent, Case

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
    program = [sys.executable, "-m", f"{__package__}.rank", case.name, side]
    commands = [[*program, str(file)] for file in files]
    places = [_place(rank, case.ranks, port) for rank in range(case.ranks)]
    return waited_for(commands, places, files, timeout)


def waited_for(
    commands: Sequence[Sequence[str]],
    places: Sequence[Mapping[str, str]],
    files: Sequence[pathlib.Path],
    timeout: float,
) -> tuple[str, str]:
    """Run ranks to their end, at most ``timeout`` seconds; none is left.

    Args:
        commands: what each runs.
        places: what each finds in its environment besides.
        files: where each writes what it has found.
        timeout: in seconds.

    Returns:
        The state, and what was seen.
    """
    ranks = []
    try:
        for command, place, file in zip(commands, places, files, strict=True):
            with file.with_suffix(".log").open("w") as log:
                environment = {**os.environ, **place}
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
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


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], files: Sequence[pathlib.Path], timeout: float
) -> None:
    """Until all have ended, one has failed, or it takes too long."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and None in (ended := [each.poll() for each in ranks]):
        if any(ended) or any(found["state"] == FAILS for found in _read(files)):
            end = min(end, time.monotonic() + _GRACE)
        time.sleep(_LOOK_EVERY)


def _verdict(
    ranks: Sequence[subprocess.Popen[bytes]], files: Sequence[pathlib.Path], timeout: float
) -> tuple[str, str]:
    """A death, of which others see the end of a connection; else what was reported, as the lowest
    rank sees it; else the error that was first, or a hang.
    """
    found = sorted(_read(files), key=lambda each: not each["symptom"] and float(each["at"]))
    for rank, (process, file) in enumerate(zip(ranks, files, strict=True)):
        status = process.poll()
        if status and not file.exists():
            return FAILS, f"rank {rank} {_death(status, file.with_suffix('.log'))}"
    for each in found:
        if each["state"] == FAILS:
            return FAILS, each["text"]
    if len(found) < len(files):
        return FAILS, f"hangs: {len(files) - len(found)} of {len(files)} ranks wait {timeout:g} s"
    return RIGHT, max((each["text"] for each in found), key=len)


def _death(status: int, log: pathlib.Path) -> str:
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ends with {status}"
    lines = log.read_text().strip().splitlines()
    why = [line.strip() for line in lines if "what():" in line] or lines[-1:]
    return f"{how}: {why[0]}" if why else how


def _read(files: Sequence[pathlib.Path]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in files if file.exists()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
