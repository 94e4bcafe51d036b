"""Pipelines whose stages are sharded and share tensors with other ranks, over Gloo processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.all_true import assert_all
from tests.mesh import sharded_tensor_workers as workers
from tests.ranks import Ranks

SAID = {
    "elsewhere": "along the trainer's mesh these are [",
    "on some ranks": "every rank must be given the same mesh, but rank 0 has none: its pipelines",
    "fewer ranks": "torch does not reshard to fewer ranks",
}


@pytest.fixture(scope="module")
def four(on_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("both")
    return on_ranks(workers.four_ranks, 4, (folder,), timeout=200)


@pytest.mark.parametrize("case", [*workers.EXACT, "half", "split"])
def test_a_step_is_that_of_eager_mode(four: list[dict[str, Any]], case: str) -> None:
    """Bit for bit that of the same modules under FSDP2, or of means over shares in eager mode."""
    for found in four:
        assert_all(found[case])


def test_checkpoints(four: list[dict[str, Any]]) -> None:
    """They have whole tensors, and are taken up by this mesh and by one process."""
    for found in four:
        assert_all(found["saved"])


@pytest.mark.parametrize("case", SAID)
def test_what_is_refused(four: list[dict[str, Any]], case: str) -> None:
    for found in four:
        assert SAID[case] in found["refused"][case]
