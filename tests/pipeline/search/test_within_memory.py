"""Searches within limits of memory."""

from __future__ import annotations

import random

import pytest

from autosplit.mesh.costs import Link
from autosplit.pipeline.search.remedies import REMEDIES
from autosplit.pipeline.search.search import named_schedules
from autosplit.pipeline.search.within_memory import LimitError, search_within
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.pipeline.validation.validate import validate

# --- the search within a limit of memory, against single measures and proven optima ---------------


def small(seed: int) -> tuple[Costs, int, float]:
    """Costs of a small pipeline in small whole numbers, M, and a limit."""
    chance = random.Random(seed)
    stages = chance.choice((2, 3))
    costs = Costs(
        [(float(chance.randint(2, 4)), float(chance.randint(2, 4)), 2.0) for _ in range(stages)],
        [StageMemory(float(chance.choice((4, 6))), 3.0, 1.0) for _ in range(stages)],
        Transfer(0.0, 16.0, host=Link(0.0, 8.0)),
    )
    return costs, 3, chance.choice((9.0, 12.0))


@pytest.mark.parametrize("seed", [1, 4])
def test_never_longer_than_by_a_single_measure(seed: int) -> None:
    costs, microbatches, limit = small(seed)
    stages = len(costs.times)
    result = search_within(costs, microbatches, limit, placement=tuple(range(stages)))
    validate(result)
    step = costs.timeline(result).step_time
    assert max(peak_memory(result, costs.memory)) <= limit * 1.0001
    for name, measure in REMEDIES.items():
        for schedule in named_schedules(costs.times, microbatches, stages):
            if schedule.placement != tuple(range(stages)):
                continue
            tried = measure(schedule, costs, [limit] * stages)
            timeline = costs.timeline(tried)
            if max(peak_memory(tried, costs.memory)) <= limit:
                assert step <= timeline.step_time * 1.0001, name


def test_a_step_within_a_limit_is_the_shortest_there_is() -> None:
    """An exact solver has proved both: without measures it is 38."""
    costs, microbatches, limit = small(4)
    placement = tuple(range(len(costs.times)))
    result = search_within(costs, microbatches, limit, placement=placement)
    assert 30 <= costs.timeline(result).step_time <= 1.02 * 30


def test_measures_are_taken_only_where_they_are_needed() -> None:
    costs = Costs([(2.0, 2.0, 2.0)] * 2, [StageMemory(6.0, 3.0, 1.0)] * 2)
    tight, free = (search_within(costs, 5, most, placement=(0, 1)) for most in (8.0, 130.0))
    steps = [costs.timeline(item).step_time for item in (tight, free)]
    assert steps[0] >= steps[1]
    assert max(peak_memory(tight, costs.memory)) <= 8.0 < max(peak_memory(free, costs.memory))
    assert all(action.kind.is_compute for row in free.ranks for action in row)


def test_fixed_memory_counts() -> None:
    costs, microbatches, _ = small(0)
    ranks = len(costs.times)
    with pytest.raises(LimitError, match="no schedule within a limit of 10 bytes a rank was found"):
        search_within(costs, microbatches, 10.0, fixed=[10.0] * ranks)
    free = search_within(costs, microbatches, 100.0)
    fits = search_within(costs, microbatches, 110.0, fixed=[10.0] * ranks)
    assert costs.timeline(fits).step_time == costs.timeline(free).step_time


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_limit_too_low_says_the_least_that_would_do_and_it_does(chunks: int) -> None:
    memory = [StageMemory(6.0, 3.0, 1.0, workspace=(0.0, 1.0, 0.5, 0.0))] * 2 * chunks
    costs = Costs([(2.0, 2.0, 2.0)] * 2 * chunks, memory)
    with pytest.raises(LimitError, match="the most frugal schedule needs") as caught:
        search_within(costs, 4, 2.0, ranks=2, fixed=[1.0, 0.0])
    error = caught.value
    # A backward needs all of a microbatch, and what it takes for itself, beside what is fixed.
    bound = 1.0 + 6.0
    assert error.least >= bound * 0.999
    assert chunks > 1 or error.least == pytest.approx(bound)
    result = search_within(costs, 4, error.least, ranks=2, fixed=[1.0, 0.0])
    assert max(peak_memory(result, memory)) <= error.least


@pytest.mark.parametrize("limit", [13.0, 25.0])
def test_gradients_add_up_in_the_order_of_microbatches(limit: float) -> None:
    """Though what I leaves for W is more than what F does, so that a B keeps less."""
    memory = [StageMemory(6.0, 9.0, 1.0)] * 2
    costs = Costs([(2.0, 3.0, 2.0)] * 2, memory, Transfer(0.0, 16.0, host=Link(0.0, 8.0)))
    result = search_within(costs, 4, limit, placement=(0, 1))
    for row in result.ranks:
        added = [action.microbatch for action in row if action.kind.value in "WB"]
        assert added == sorted(added)
