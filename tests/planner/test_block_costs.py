"""Costs of blocks: how they add up to stages, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autosplit.errors import PlanError
from autosplit.planner.costs import BlockCost, ModelCosts, average, total

SMALL = BlockCost(1.0, 2.0, 3.0, 10.0, 20.0, 30.0, 4.0)
LARGE = BlockCost(5.0, 6.0, 7.0, 50.0, 60.0, 70.0, 8.0)


def test_blocks_add_up() -> None:
    assert total([SMALL, LARGE]) == BlockCost(6.0, 8.0, 10.0, 60.0, 80.0, 100.0, 12.0)


def test_a_call_is_paid_once_a_stage() -> None:
    costs = ModelCosts((SMALL, LARGE, SMALL), (8.0, 9.0), call=0.5)
    assert costs.stage(1, 3) == BlockCost(6.5, 8.5, 10.5, 60.0, 80.0, 100.0, 12.5)
    assert costs.stage(2, 3).times == (1.5, 2.5, 3.5)


def test_a_first_stage_has_no_input_gradient_and_keeps_all_until_w() -> None:
    costs = ModelCosts((SMALL, LARGE, SMALL), (8.0, 9.0), call=0.5)
    assert costs.stage(0, 2) == BlockCost(6.5, 0.0, 12.5, 60.0, 60.0 + 9.0, 100.0, 12.5)
    assert costs.stage(0, 3).deferred == 70.0
    assert replace(costs, returning=(8.0, 3.0)).stage(0, 2).deferred == 60.0 + 3.0


def test_the_mean_of_what_ranks_found() -> None:
    ours, theirs = ModelCosts((SMALL,), (), call=0.5), ModelCosts((LARGE,), (), call=1.5)
    mean = BlockCost(3.0, 4.0, 5.0, 30.0, 40.0, 50.0, 6.0)
    assert average([ours, theirs]) == ModelCosts((mean,), (), call=1.0, returning=())
    with pytest.raises(PlanError, match="costs of one model, got 1, 2 blocks"):
        average([ours, ModelCosts((SMALL, SMALL), (1.0,))])


@pytest.mark.parametrize("range_", [(0, 0), (1, 3), (-1, 1)])
def test_refuses_blocks_that_are_not_there(range_: tuple[int, int]) -> None:
    costs = ModelCosts((SMALL, LARGE), (8.0,))
    with pytest.raises(PlanError, match=f"0 to 2, got {range_[0]} to {range_[1]}"):
        costs.stage(*range_)


def test_refuses_impossible_costs() -> None:
    with pytest.raises(PlanError, match="forward of a block must be a finite number >= 0"):
        BlockCost(math.nan, 0, 0, 0, 0, 0, 0)
    with pytest.raises(PlanError, match=r"crossing of a cut .* got -1"):
        ModelCosts((SMALL, LARGE), (-1.0,))
    with pytest.raises(PlanError, match="2 blocks and 0 cuts"):
        ModelCosts((SMALL, LARGE), ())
    with pytest.raises(PlanError, match="2 blocks and 2 cuts"):
        ModelCosts((SMALL, LARGE), (1.0,), returning=(1.0, 1.0))
