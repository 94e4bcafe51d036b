"""Ranks that ``launch`` starts and ranks that torchrun's agent starts, once for all tests of
processes; they begin with what takes longest to import.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.launcher.api import elastic_launch

from autosplit.ranks import launch as launching
from autosplit.ranks.default_group import process_group
from tests.interpreters import Servers, interpreters, rank_processes, torchrun_config
from tests.ranks.sockets import of_a_rank


@pytest.fixture(scope="session")
def launched() -> list[dict[str, Any]]:
    """Identity and sockets of two ranks, by rank."""
    with mock.patch.object(launching, "get_context", return_value=rank_processes()):
        return launching.launch(of_a_rank, 2, (3, os.getpid()), timeout=200, threads=2)


def elastic_rank(folder: Path) -> None:
    """Leave the identity and the sockets of this rank in a folder."""
    with process_group(timeout=60):
        result = of_a_rank(3)
    (folder / f"{result['identity'][0] // 3}.json").write_text(json.dumps(result))


def agent(folder: Path, servers: Servers) -> None:
    """Do what ``torchrun --standalone --nproc-per-node 2`` does."""
    servers.join(ranks=True)
    elastic_launch(torchrun_config("ranks"), elastic_rank)(folder)


@pytest.fixture(scope="session")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same of ranks that torchrun's agent starts."""
    folder = tmp_path_factory.mktemp("torchrun")
    process = interpreters().Process(target=agent, args=(folder, Servers.running()))
    process.start()
    try:
        process.join(120)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
