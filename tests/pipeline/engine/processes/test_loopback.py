"""Other hosts reach no socket of ranks that are all on one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autosplit.pipeline.engine.processes.launch import launch
from autosplit.pipeline.engine.processes.loopback import on_loopback
from tests.pipeline import sockets

ROOT = Path(__file__).resolve().parents[4]

TORCHRUN = """
import json
import sys
from pathlib import Path
from tests.pipeline import sockets
from autosplit.pipeline.engine.processes.worker import process_group
if __name__ == "__main__":
    with process_group(timeout=60):
        found = sockets.of_a_rank_that_trains()["rank"]
    name = "-".join(sorted(found)).replace(":", "_")
    Path(sys.argv[1], f"{len(found)} {name}.json").write_text(json.dumps(found))
"""


def test_a_socket_that_other_hosts_reach_is_seen() -> None:
    assert [*map(sockets.loopback, ["127.0.0.1:1", "0.0.0.0:1", "10.1.2.3:1"])] == [True] + [
        False
    ] * 2


def test_launch_listens_on_loopback_only() -> None:
    found = launch(sockets.of_a_rank_that_trains, 2, timeout=60)
    for own in (*(rank["rank"] for rank in found), found[0]["parent"]):
        assert own
        assert all(map(sockets.loopback, own)), own


def test_ranks_of_one_machine_under_torchrun_listen_on_loopback_only(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run(
        [sys.executable, *command, str(tmp_path)], env=environment, timeout=120, check=True
    )
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(found) == 2
    for own in found:
        assert own
        assert all(map(sockets.loopback, own)), own


def test_an_interface_that_the_user_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with on_loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
        assert os.environ["NCCL_SOCKET_IFNAME"].startswith("=lo")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
