"""Pipelines with replicas, over real Gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.mesh import workers
from tests.ranks import Ranks

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def four(on_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("mesh")
    return on_ranks(workers.four_ranks, 4, (folder,), timeout=120)


@pytest.mark.parametrize("case", [*workers.EXACT, "turned"])
def test_losses_gradients_and_norm(four: Results, case: str) -> None:
    """Bit for bit those of autograd in one process, which averages the two shares."""
    for found in four:
        assert found[case] == dict.fromkeys(found[case], True)
