"""Costs of blocks: how they add up to stages, and what is refused."""

from __future__ import annotations

from dataclasses import replace

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
