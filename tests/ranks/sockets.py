"""On which addresses processes listen, by what the kernel says."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Any

from tests.pipeline.workers import data, identify, trainer

_LISTENS = "0A"


def of_a_rank(factor: int, launcher: int | None = None) -> dict[str, Any]:
    """Who this rank is, and after a step of a trainer, its sockets and those of the process that
    launched it, by default its parent.
    """
    identity = identify(factor)
    with trainer() as engine:
        engine.step(data(8))
        local, parents = (listening(pid) for pid in (os.getpid(), launcher or os.getppid()))
    return {"identity": identity, "rank": local, "parent": parents}


def listening(pid: int) -> list[str]:
    """``address:port`` of each socket on which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # closed since
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    results = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in inodes:
                address, port = fields[1].split(":")
                results.append(f"{_address(address)}:{int(port, 16)}")
    return results


def loopback(socket: str) -> bool:
    return ipaddress.ip_address(socket.rpartition(":")[0]).is_loopback


def _address(text: str) -> str:
    """The kernel writes words of four bytes in the machine's order, here the little end first."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
