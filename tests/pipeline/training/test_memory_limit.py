"""Limits of memory as users reach them: what a refusal advises, and what is left behind one."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosplit.errors import PipelineError
from tests.pipeline.training import limit_workers
from tests.ranks import Ranks


def test_the_limit_that_a_refusal_advises_is_kept(on_ranks: Ranks) -> None:
    """On a transformer as people wrap it, whose kernels take memory for themselves."""
    found, other = on_ranks(limit_workers.advised, 2, ("gpt2",), timeout=120.0)
    assert found == other
    assert len(found["advice"]) == 1, found
    assert max(found["held"]) <= found["advice"][0], found


def test_a_limit_that_is_refused_after_measuring(on_ranks: Ranks, tmp_path: Path) -> None:
    """Before the optimizer moves in that step: weights are those of the steps before it."""
    for found in on_ranks(limit_workers.refused_after_measuring, 2, (tmp_path,), timeout=60.0):
        assert found["done"] == 2
        assert "memory_limit: nothing was found that keeps 3,000,000 bytes" in found["heard"]
        assert found["same"]
        assert "this trainer has ended and cannot go on; build a new one" in found["step"]
        assert "this trainer has ended and cannot go on; build a new one" in found["checkpoint"]
        assert len(found["again"]) == limit_workers.SETTLED
    assert not [*tmp_path.iterdir()]


def test_a_batch_that_no_step_could_take_ends_no_trainer(on_ranks: Ranks) -> None:
    for said in on_ranks(limit_workers.refused_batches, 2, timeout=60.0):
        odd, different, first, small, other, again = said
        assert "inputs of 2 samples on rank 0 and targets of 128 samples on rank 1" in different
        assert first == again == ""
        assert "127 samples along dimension 0 cannot be cut into 2 equal microbatches" in odd
        assert "the batch's inputs are float32[2, 48], but were float32[128, 48]" in small
        assert "are float32[8, 48], but were float32[128, 48] at first" in other


@pytest.mark.parametrize("store", [5, "", b"/tmp"])
def test_a_store_that_is_no_folder(store: object) -> None:
    with pytest.raises(PipelineError, match="store is the folder for what is offl"):
        limit_workers.stages(store=store, memory_limit="1GiB", ranks=1)
