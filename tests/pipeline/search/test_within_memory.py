"""The search within a limit of memory, against single measures and proven optima."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.search.starts import named_schedules
from autosplit.pipeline.search.within_memory import MEASURES, LimitError, search_within
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.pipeline.validation.validate import validate
from benchmarks.optimum import optimum


def small(seed: int) -> tuple[Costs, int, float]:
    """Costs of a small pipeline in small whole numbers, M, and a limit."""
    chance = random.Random(seed)
    stages = chance.choice((2, 3))
    costs = Costs(
        [(float(chance.randint(2, 4)), float(chance.randint(2, 4)), 2.0) for _ in range(stages)],
        [StageMemory(float(chance.choice((4, 6))), 3.0, 1.0, tensors=4) for _ in range(stages)],
        Transfer(0.0, 16.0, host=Link(0.0, 8.0)),
    )
    return costs, 3, chance.choice((9.0, 12.0))


@pytest.mark.parametrize("seed", [1, 4])
def test_never_longer_than_by_a_single_measure(seed: int) -> None:
    costs, microbatches, limit = small(seed)
    stages = len(costs.times)
    found = search_within(costs, microbatches, limit, placement=tuple(range(stages)))
    validate(found.schedule)
    assert max(found.peaks) <= limit * 1.0001
    assert list(found.peaks) == peak_memory(found.schedule, costs.memory)
    for name, measure in MEASURES.items():
        with contextlib.suppress(LimitError):
            alone = search_within(
                costs, microbatches, limit, placement=tuple(range(stages)), measures=(name,)
            )
            assert found.timeline.step_time <= alone.timeline.step_time * 1.0001, name
        for each in named_schedules(costs.times, microbatches, stages):
            if each.placement != tuple(range(stages)):
                continue
            tried = measure(each, costs, [limit] * stages)
            timeline = costs.timeline(tried)
            if max(peak_memory(tried, costs.memory)) <= limit:
                assert found.timeline.step_time <= timeline.step_time * 1.0001, name


def test_no_step_is_shorter_than_the_shortest_there_is() -> None:
    costs, microbatches, limit = small(4)
    placement = tuple(range(len(costs.times)))
    found = search_within(costs, microbatches, limit, placement=placement)
    step = found.timeline.step_time
    least = optimum(costs, microbatches, limit, measures=MEASURES, known=step, seconds=10).bound
    none = optimum(costs, microbatches, limit, seconds=10).bound
    assert least <= none
    assert 0 < least <= step * 1.0001
    assert step <= 1.02 * least


def test_the_report_says_what_each_measure_costs_and_saves() -> None:
    costs = Costs([(2.0, 2.0, 2.0)] * 2, [StageMemory(6.0, 3.0, 1.0)] * 2)
    found = search_within(costs, 5, 13.0, placement=(0, 1), measures=("recompute",))
    assert found.timeline.step_time >= found.unlimited
    for effect in found.effects:
        assert effect.measure == "recompute"
        assert max(effect.saved) > 0


def test_the_better_setting_of_the_split_is_taken() -> None:
    costs, microbatches, _ = small(0)
    slow = replace(costs, times=[(f + 1, i, w) for f, i, w in costs.times])
    lean = replace(slow, memory=[StageMemory(2.0, 2.0, 1.0)] * len(costs.times))
    both = {"saved": costs, "lean": lean}
    assert search_within(both, microbatches, 100.0).setting == "saved"
    assert search_within(both, microbatches, 4.0, measures=()).setting == "lean"


def test_what_is_fixed_counts() -> None:
    costs, microbatches, _ = small(0)
    ranks = len(costs.times)
    with pytest.raises(LimitError, match=r"Rank 0 holds 10 of param.* and optimizer state dom"):
        search_within(costs, microbatches, 10.0, fixed=[10.0] * ranks)
    free = search_within(costs, microbatches, 100.0)
    fits = search_within(costs, microbatches, 110.0, fixed=[10.0] * ranks)
    assert fits.timeline.step_time == free.timeline.step_time


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_limit_too_low_says_the_least_that_would_do_and_it_does(chunks: int) -> None:
    memory = [StageMemory(6.0, 3.0, 1.0, workspace=(0.0, 1.0, 0.5, 0.0))] * 2 * chunks
    costs = Costs([(2.0, 2.0, 2.0)] * 2 * chunks, memory)
    with pytest.raises(LimitError, match=r"the least that was needs .* activations dom") as caught:
        search_within(costs, 4, 2.0, ranks=2, fixed=[1.0, 0.0])
    error = caught.value
    # A backward needs all of a microbatch, and what it takes for itself, beside what is fixed.
    assert error.bound == pytest.approx(1.0 + 6.0)
    assert error.least >= error.bound * 0.999
    assert chunks > 1 or error.least == pytest.approx(error.bound)
    found = search_within(costs, 4, error.least, ranks=2, fixed=[1.0, 0.0])
    assert max(peak_memory(found.schedule, memory)) <= error.least


@pytest.mark.parametrize("limit", [13.0, 25.0])
def test_gradients_add_up_in_the_order_of_microbatches(limit: float) -> None:
    """Though what I leaves for W is more than what F does, so that a B keeps less."""
    memory = [StageMemory(6.0, 9.0, 1.0, tensors=4)] * 2
    costs = Costs([(2.0, 3.0, 2.0)] * 2, memory, Transfer(0.0, 16.0, host=Link(0.0, 8.0)))
    found = search_within(costs, 4, limit, placement=(0, 1))
    for row in found.schedule.ranks:
        added = [action.microbatch for action in row if action.kind.value in "WB"]
        assert added == sorted(added)


def test_unknown_measures_are_refused() -> None:
    costs, microbatches, _ = small(0)
    with pytest.raises(ScheduleError, match="unknown measure 'prune'; known: balance, offload"):
        search_within(costs, microbatches, 2.0, measures=("prune",))


@pytest.mark.parametrize(
    ("stages", "microbatches", "workspace"), [(2, 8, 0.0), (4, 4, 0.0), (2, 2, 1e9)]
)
def test_how_much_is_simulated_is_bounded(stages: int, microbatches: int, workspace: float) -> None:
    """Also where operators take for themselves what hundreds of microbatches would."""
    takes = (workspace, 0.0, 0.0, 0.0)
    memory = [StageMemory(7.5e6, 5.5e6, 2.6e5, tensors=20, workspace=takes)] * stages
    limit = workspace + 1.5 * 7.5e6
    links = Transfer(1e-4, 1e9, host=Link(2e-5, 1.5e9))
    costs = Costs([(0.02, 0.02, 0.02)] * stages, memory, links)
    found = search_within(costs, microbatches, limit, placement=range(stages))
    assert max(found.peaks) <= limit
    assert found.simulated <= 95_000  # see search_cheaply
