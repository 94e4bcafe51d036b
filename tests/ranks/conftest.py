"""Ranks that ``launch`` starts and ranks that torchrun starts, once for all tests of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autosplit.ranks.launch import launch
from tests.ranks.sockets import of_a_rank

ROOT = Path(__file__).resolve().parents[2]

TORCHRUN = """
import json
import sys
from pathlib import Path
from autosplit.ranks.default_group import process_group
from tests.ranks.sockets import of_a_rank
if __name__ == "__main__":
    with process_group(timeout=60):
        found = of_a_rank(3)
    Path(sys.argv[1], f"{found['identity'][0] // 3}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Of a process that imports what this one does."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def launched() -> list[dict[str, Any]]:
    """Identity and sockets of two ranks, by rank."""
    return launch(of_a_rank, 2, (3,), timeout=200, threads=2)


@pytest.fixture(scope="session")
def under_torchrun(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The same of ranks that torchrun starts."""
    folder = tmp_path_factory.mktemp("torchrun")
    script = folder / "script.py"
    script.write_text(TORCHRUN)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run(
        [sys.executable, *command, str(folder)], env=environment, timeout=120, check=True
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
