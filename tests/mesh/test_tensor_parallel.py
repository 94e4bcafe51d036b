"""Pipelines whose stages share tensors with other ranks, over real Gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.all_true import assert_all
from tests.mesh import tensor_parallel_workers as workers
from tests.ranks import Ranks

LIES = "is a DTensor over the ranks"
SAID = {
    "over the pipeline": (LIES, "let each stage be parallelize_module(stage, mesh['tp'], plan),"),
    "no tp": (LIES, "the trainer has no mesh with 'tp' or 'ep': let each stage be parallelize_mod"),
    "nothing shared": ("the mesh has 2 ranks along 'tp', and no parameter of any stage is shared",),
    "other widths": ("hold parts of the same stages, which must be built alike",),
    "memory": ("every rank must build the same trainer, but memory is 'fast' on rank 0 and",),
    "other batches": ("share the tensors of their stages and were given different batches: give ",),
    "other seeds": ("share the tensors of a stage and have the losses", "the same seed"),
    "handed on": ("returns output, a DTensor", "use_local_output=True"),
}


@pytest.fixture(scope="module")
def four(on_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("parts")
    return on_ranks(workers.four_ranks, 4, (folder,), timeout=200)


def test_losses_gradients_and_norm(four: list[dict[str, Any]]) -> None:
    """Bit for bit those of eager mode with the tensors shared alike, in one stage."""
    for found in four:
        seen = [found[case] for case in workers.EXACT]
        assert all(each["losses"] and each["gradients"] and each["norm"] for each in seen), found


def test_checkpoints(four: list[dict[str, Any]]) -> None:
    """They have whole tensors, and are taken up by this mesh, one process, and torch's loader."""
    for found in four:
        assert_all(found["saved"])


@pytest.mark.parametrize("case", SAID)
def test_what_is_refused(four: list[dict[str, Any]], case: str) -> None:
    for found in four:
        assert all(part in found["refused"][case] for part in SAID[case]), found["refused"][case]


def test_a_part_that_is_no_number_is_seen_by_all(four: list[dict[str, Any]]) -> None:
    assert [found["1f1b"]["nan"] for found in four] == ["nan True"] * 4


def test_a_rank_that_fails_ends_those_that_wait_for_its_part(on_ranks: Ranks) -> None:
    for heard in on_ranks(workers.failing, 4, timeout=60):
        assert "rank 3 failed in 1F1: ValueError: bad weather" in heard
