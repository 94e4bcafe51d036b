"""Memory limits as users reach them: the advice of refusals, and no leftovers."""

from __future__ import annotations

import re

import pytest

from autosplit.errors import PipelineError
from autosplit.trainer.trainer import PipelineTrainer
from tests.kept_ranks import ranks
from tests.pipeline.ledger import workers

SETTLED = 6  # steps


def least(error: PipelineError) -> int:
    return int(re.findall(r"memory_limit=(\d+)", str(error))[0])


@ranks(2)
def test_the_limit_that_a_refusal_advises_is_kept() -> None:
    """On stages whose kernels take memory for themselves."""

    def limited(limit: int) -> PipelineTrainer:
        return workers.trainer(block=workers.Convolutions, memory_limit=limit)

    with pytest.raises(PipelineError) as caught, limited(1024) as refused:
        refused.step(workers.batch())
    advised = least(caught.value)
    with limited(advised) as engine:
        for step in range(SETTLED):
            engine.record = "memory" if step == SETTLED - 1 else False
            engine.step(workers.batch())
        memory, report = engine.memory(), engine.report()
    kept = [*map(sum, zip(memory.peak_activations, memory.fixed, strict=True))]
    assert max(kept) <= advised
    assert memory.limit_kept
    assert str(memory).endswith("memory_limit: kept")
    assert "memory_limit: kept" in report


@pytest.mark.parametrize("store", [5, "", b"/tmp"])
def test_a_store_that_is_no_folder(store: object) -> None:
    with pytest.raises(PipelineError, match="store must be a folder for offloaded"):
        workers.trainer(store=store, memory_limit="1GiB", ranks=1)
