"""Meshes of three dimensions, on eight Gloo processes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from autosplit.errors import PipelineError
from tests.all_true import assert_all
from tests.mesh import three_dimensions_workers as workers
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def folder(on_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ranks left of which one was killed in the end."""
    found = tmp_path_factory.mktemp("eight")
    with pytest.raises(PipelineError):
        on_ranks(workers.with_a_death, 8, (found,), timeout=200)
    return found


@pytest.mark.parametrize("case", ["replicas_of_shared_stages", "uneven_shards"])
def test_a_step_is_that_of_eager_mode(folder: Path, case: str) -> None:
    for rank in range(8):
        assert_all(pickle.loads((folder / f"{case}{rank}").read_bytes()))


def test_a_killed_rank_ends_all(folder: Path) -> None:
    """Those of its pipeline, of its parts of tensors and of its shards."""
    how = ("rank 5 was killed by SIGKILL", "rank 5 ended without a word")  # once it is reaped
    for rank in (0, 1, 2, 3, 4, 6, 7):
        assert (folder / f"seen{rank}").read_text().startswith(how)
