"""``python -m benchmarks.faults.hosts`` trains over two hosts, with and without faults.

The hosts are two network namespaces of this machine, joined by a virtual cable: Linux, root and
``ip`` (iproute2) are needed. Rows are added to ``benchmarks/faults/README.md``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..results import Results, describe
from .page import render

HERE = pathlib.Path(__file__).parent
STEPS = 300
EVERY = 20  # steps between checkpoints
FAULTY = 100  # steps before the fault
BACK = 30.0  # seconds until a host that was killed is there again
PATIENCE = 240.0  # seconds for a run

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}

MORE = {"host": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
"""Variables by run: where agents share a store, torchrun does not tell a new one where it is."""

History = list[dict[str, Any]]


class Hosts:
    """Two namespaces, ``first`` and ``second``, with a cable between them."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._names = [f"autosplit-{os.getpid()}-{which}" for which in ("first", "second")]
        self._addresses = ["10.77.0.1", "10.77.0.2"]
        self._agents: list[subprocess.Popen[bytes]] = []

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Set up before, taken down behind."""
        ends = [f"as{os.getpid()}{letter}" for letter in "ab"]
        try:
            for name in self._names:
                _ip("netns", "add", name)
            _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for name, end, address in zip(self._names, ends, self._addresses, strict=True):
                _ip("link", "set", end, "netns", name)
                _ip("-n", name, "link", "set", end, "name", "cable")
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    _ip("-n", name, "link", "set", device, "up")
            yield
        finally:
            for name in self._names:
                self.kill(self._names.index(name))
                subprocess.run(["ip", "netns", "del", name], check=False)

    def start(self, name: str, which: int) -> None:
        """torchrun on one host, for the run of that name."""
        agent = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{self._addresses[0]}:29400", "--rdzv-id", name),
            *("--rdzv-conf", f"is_host={1 - which}", "--local-addr", self._addresses[which]),
            *("-m", "autosplit", *_training(self._folder, name), "--resume"),
        ]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
        environment |= MORE.get(name, {})
        with (self._folder / f"{name}-{which}.log").open("ab") as log:
            self._agents.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", self._names[which], *agent],
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )

    def processes(self, which: int) -> dict[int, str]:
        """Of a host, with their command lines."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._names[which]],
            capture_output=True,
            text=True,
            check=False,
        )
        found = {}
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(OSError):
                line = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = line.replace(b"\0", b" ").decode()
        return found

    def kill(self, which: int, part: str = "") -> None:
        """SIGKILL what runs on a host and has ``part`` in its command line."""
        for pid, line in self.processes(which).items():
            if part in line:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def wait(self) -> None:
        """Until the agents have ended."""
        for agent in self._agents:
            agent.wait(PATIENCE)
        self._agents.clear()


def nothing(hosts: Hosts, name: str) -> None:
    """No fault."""


def rank(hosts: Hosts, name: str) -> None:
    """The second host's rank is killed."""
    hosts.kill(1, "-u -m autosplit")


def host(hosts: Hosts, name: str) -> None:
    """All that runs on the second host is killed, and torchrun is started there again, when that of
    the first host no longer counts the one that is gone.
    """
    hosts.kill(1)
    time.sleep(BACK)
    hosts.start(name, 1)


FAULTS: dict[str, Callable[[Hosts, str], None]] = {"none": nothing, "rank": rank, "host": host}


def tried(name: str, hosts: Hosts, folder: pathlib.Path, expected: History) -> dict[str, Any]:
    """A run over both hosts with a fault, held against one on one host."""
    for which in (0, 1):
        hosts.start(name, which)
    deadline = time.monotonic() + PATIENCE
    while len(_history(folder, name)) < FAULTY and time.monotonic() < deadline:
        time.sleep(0.1)
    FAULTS[name](hosts, name)
    hosts.wait()
    found = _history(folder, name)
    log = (folder / f"{name}-0.log").read_text()
    said = [line for line in log.splitlines() if line.startswith("Error: ")]
    begun = [line for line in log.splitlines() if line.startswith("loss ")]
    same = ("step", "loss", "grad_norm")
    return {
        "name": name,
        "steps": len(found),
        "same": [[row[key] for key in same] for row in found]
        == [[row[key] for key in same] for row in expected],
        "said": said[0].removeprefix("Error: ") if said else "",
        "went_on": int(begun[-1].split("at step ")[1].split(",")[0]) if begun else 0,
    }


def main() -> None:
    results = Results.read(HERE / "results.json")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        (folder / "text").write_text((HERE / "README.md").read_text())
        alone = [sys.executable, "-m", "autosplit", *_training(folder, "alone")]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(alone, check=True, stdout=subprocess.DEVNULL, env=environment)
        expected = _history(folder, "alone")
        for name in FAULTS:
            hosts = Hosts(folder)
            with hosts.connected():
                row = tried(name, hosts, folder, expected)
            print(json.dumps(row))
            command = "python -m benchmarks.faults.hosts"
            results.update("hosts", [row], command, describe())
    (HERE / "README.md").write_text(render(results))


def _training(folder: pathlib.Path, name: str) -> list[str]:
    """Arguments of ``autosplit``."""
    return [
        *("train", str(folder / "model"), "--pp", "2", "--data", str(folder / "text")),
        *("--length", "32", "--batch", "8", "--microbatches", "4", "--steps", str(STEPS)),
        *("--estimate", "--checkpoint", str(folder / name), "--every", str(EVERY)),
        *("--history", str(folder / f"{name}.jsonl")),
    ]


def _history(folder: pathlib.Path, name: str) -> History:
    path = folder / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
        return [json.loads(line) for line in lines]
    return []


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


if __name__ == "__main__":
    main()
