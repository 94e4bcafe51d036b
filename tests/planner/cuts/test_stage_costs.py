"""Costs of the stages of many cuts at once: the sums that ``ModelCosts.stage`` makes one by one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings

from autosplit.planner.costs.block_costs import BlockCost, ModelCosts
from autosplit.planner.cuts.stage_costs import PrefixSums
from tests.planner.planned import models


@settings(max_examples=60, deadline=None)
@given(models(least=3))
def test_all_cuts_at_once_cost_what_each_does_alone(costs: ModelCosts) -> None:
    blocks = len(costs.blocks)
    ways = list(itertools.combinations(range(blocks - 1), 2))
    found = PrefixSums(costs).stages(torch.tensor(ways))
    for way, (first, second) in enumerate(ways):
        bounds = [(0, first + 1), (first + 1, second + 1), (second + 1, blocks)]
        for index, (start, end) in enumerate(bounds):
            alone = costs.stage(start, end)
            assert tuple(found.times[:, index, way].tolist()) == pytest.approx(alone.times)
            assert found.kept[:, index, way].tolist() == [alone.saved, alone.deferred]
            assert found.parameters[index, way] == alone.parameters
        assert found.crossing[:, way].tolist() == [costs.crossing[first], costs.crossing[second]]
        assert found.returning[:, way].tolist() == [costs.gradients[first], costs.gradients[second]]


@settings(max_examples=60, deadline=None)
@given(models())
def test_every_run_of_blocks_is_in_the_table(costs: ModelCosts) -> None:
    blocks = len(costs.blocks)
    sums = PrefixSums(costs)
    tables = {leads: sums.table(first=leads) for leads in (True, False)}
    runs = list(itertools.combinations(range(blocks + 1), 2))
    for start, end in runs:
        times, kept, parameters = tables[start == 0]
        alone = costs.stage(start, end)
        assert tuple(times[:, start, end].tolist()) == pytest.approx(alone.times)
        assert kept[:, start, end].tolist() == [alone.saved, alone.deferred]
        assert parameters[start, end] == alone.parameters
    empty = [(start, end) for start in range(blocks + 1) for end in range(start + 1)]
    assert all(tables[False][2][run].isnan() for run in empty)


def test_the_first_stage_waits_with_all_that_it_saved() -> None:
    block = BlockCost(1.0, 2.0, 3.0, 10.0, 4.0, 5.0, backward_alone=4.5)
    costs = ModelCosts((block, block), (8.0,), call=0.5, returning=(6.0,))
    found = PrefixSums(costs).stages(torch.tensor([[0]]))
    assert found.times[:, 0, 0].tolist() == [1.5, 0.0, 5.0]  # W is the whole backward
    assert found.kept[:, 0, 0].tolist() == [10.0, 10.0 + 6.0]
    assert found.times[:, 1, 0].tolist() == [1.5, 2.5, 3.5]
    assert found.kept[:, 1, 0].tolist() == [10.0, 4.0]
