"""Optimizer steps: clipped ones in flight, and failures on one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipeline.training import update_workers
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def found(on_ranks: Ranks) -> list[dict[str, Any]]:
    return on_ranks(update_workers.everything, 2, timeout=120)


@pytest.mark.parametrize("case", ["mixed", "shared"])
def test_clipped_steps_in_flight_are_those_that_wait(found: list[Any], case: str) -> None:
    """Losses, weights, buffers and norms, with dropout and a changing learning rate."""
    for rank in found:
        result = rank[case]
        clipped = result.pop("clipped")
        assert clipped == [factor > 1 for factor in update_workers.FACTORS]
        assert result == {"losses": True, "norms": True, "state": True}


def test_every_rank_hears_of_a_step_that_fails_on_one(found: list[Any]) -> None:
    said = "rank 1 failed in the optimizer step: ValueError: bad weather"
    assert [rank["apart"] for rank in found] == [(said, False)] * 2
