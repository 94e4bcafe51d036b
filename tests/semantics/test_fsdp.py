"""FSDP in, under or around a split module: refused wherever it is met, with advice that works."""

from __future__ import annotations

from tests.ranks import Ranks
from tests.semantics.fsdp_workers import SHARDINGS, WAYS, findings


def test_refused_by_name_with_advice_that_works(on_ranks: Ranks) -> None:
    for refusals, advised, trainer in on_ranks(findings, 2, timeout=100):
        assert len(refusals) == len(SHARDINGS) * len(WAYS)
        for case, text in refusals.items():
            assert "ShardedError: FSDP (fully_shard or FullyShardedDataParallel) man" in text, case
        assert "FSDP (fully_shard or FullyShardedDataParallel) manages" in trainer
        assert advised < 1e-6
