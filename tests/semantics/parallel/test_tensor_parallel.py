"""Models of which ``parallelize_module`` has made DTensors train as in eager, bit for bit."""

from __future__ import annotations

from tests.ranks import Ranks
from tests.semantics.parallel.tensor_parallel_workers import WHOLE, findings


def test_trains_as_in_eager(on_ranks: Ranks) -> None:
    ranks = on_ranks(findings, 2, timeout=100)
    assert ranks[0]["measured"][0] == ranks[1]["measured"][0]
    for found in ranks:
        assert found["measured"][1:] == [True, True]
        assert [name for name, (same, _) in found["whole"].items() if not same] == []
        assert len(found["whole"]) == len(WHOLE)
        assert found["stages"] == [True]
        counts = {name: counts for name, (_, counts) in found["whole"].items()}
        # Reductions of input gradients are I's, those of weight gradients W's.
        assert counts["prepared"]["backward_input"] == counts["prepared"]["backward"] == 3
        assert counts["prepared"]["backward_weight"] == 0
        assert counts["gathered"]["backward_input"] == 0
        assert counts["gathered"]["backward_weight"] == counts["gathered"]["backward"] == 3
        assert found["read"][0], found["read"]
