"""The search: never worse than a named schedule, within its cap."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.routes import Source, Wiring
from autosplit.pipeline.search.search import constructed, named_schedules, search
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs, simulate
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.pipeline.validation.validate import validate
from tests.pipeline.simulation.random_costs import costs_of
from tests.pipeline.tables import chain_of, rows_of


def alike(stages: int, times: tuple[float, float, float], transfer: float = 0.0) -> Costs:
    return Costs([times] * stages, [StageMemory(1.0, 1.0)] * stages, Transfer(transfer))


@pytest.mark.parametrize(
    ("times", "cap", "shortest"),
    [
        ([(1, 1, 1), (1, 1, 1)], 2, 10),
        ([(3, 3, 2), (3, 3, 2)], 2, 28),
        ([(2, 0, 3), (2, 2, 1)], 2, 18),
        ([(1, 2, 3), (3, 1, 1)], 3, 20),
        ([(2, 1, 1), (1, 3, 2)], 1, 24),
    ],
)
def test_hardly_longer_than_the_shortest(
    times: list[tuple[int, int, int]], cap: int, shortest: int
) -> None:
    """Which an exact solver has proved."""
    costs = Costs([tuple(map(float, triple)) for triple in times], [StageMemory(1.0, 1.0)] * 2)
    result = search(costs, 3, cap=float(cap))
    assert shortest <= simulate(result, costs.seconds).makespan <= 1.06 * shortest


@settings(deadline=None, max_examples=15)
@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 2))
def test_never_worse_than_a_named_schedule(
    data: st.DataObject, ranks: int, microbatches: int, chunks: int
) -> None:
    """Legal, within the cap and as short as any, as the trainer will run it."""
    stages = ranks * chunks
    costs = data.draw(costs_of(stages))
    cap = data.draw(st.sampled_from([2.5 * stages, 4.0 * stages, math.inf]))
    result = search(costs, microbatches, ranks=ranks, cap=cap)
    validate(result)
    assert max(peak_memory(result, costs.memory)) <= cap
    step = costs.timeline(result).makespan
    for named in named_schedules(costs.times, microbatches, ranks):
        if max(peak_memory(named, costs.memory)) <= cap:
            assert step <= costs.timeline(named).makespan * (1 + 1e-9), named.name


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 2))
def test_list_scheduling_keeps_its_caps(
    data: st.DataObject, ranks: int, microbatches: int, chunks: int
) -> None:
    """And is legal, also where a rank has several stages."""
    costs = data.draw(costs_of(ranks * chunks))
    caps = [data.draw(st.sampled_from([4.0, 9.0, math.inf])) for _ in range(ranks)]
    placement = (*range(ranks), *(range(ranks) if chunks == 2 else ()))
    for built in constructed(costs, microbatches, [placement], caps):
        validate(built)
        peaks = peak_memory(built, costs.memory)
        assert all(peak <= cap * 1.0001 for peak, cap in zip(peaks, caps, strict=True))
    free = [*constructed(costs, microbatches, [placement], [math.inf] * ranks)]
    assert len(free) == 2 or costs.wiring is not None


def test_a_slow_link_to_a_stage_further_on_is_part_of_the_step() -> None:
    wiring = Wiring(
        ((Source(None, 0),), (Source(0, 0),), (Source(1, 0), Source(0, 1))), outputs=(2, 1)
    )
    steps = []
    for links in (Transfer(bandwidth=1.0, message_bytes={0: 4.0, 1: 0.0}), Transfer()):
        costs = Costs([(1.0, 1.0, 1.0)] * 3, [StageMemory(1.0, 1.0)] * 3, links, wiring=wiring)
        steps.append(costs.timeline(search(costs, 1)).makespan)
    assert steps[0] > steps[1]


def test_a_full_backward_where_it_keeps_less() -> None:
    """I keeps more than F saved, so the cap has room for I and W in one action only."""
    memory = [StageMemory(1.0, 1.5)] * 2
    costs = Costs([(3.0, 2.0, 1.0)] * 2, memory)
    result = search(costs, 4, cap=2.0)
    assert "0B0" in rows_of(result)[0]
    assert max(peak_memory(result, memory)) <= 2.0
    fused = build("1f1b", 2, 4, split_backward=False)
    assert simulate(result, costs.seconds).makespan <= simulate(fused, costs.seconds).makespan


def test_bad_arguments_are_refused() -> None:
    costs = alike(2, (1.0, 1.0, 1.0))
    with pytest.raises(ScheduleError, match=r"no schedule found within the cap 0\.5; the most"):
        search(costs, 2, cap=0.5)
    with pytest.raises(ScheduleError, match="with a number for each of 2 ranks"):
        search(costs, 2, cap=[1.0])
    with pytest.raises(ScheduleError, match="2 stages cannot fill 3 ranks"):
        search(costs, 2, ranks=3)
    with pytest.raises(ScheduleError, match="microbatches must be an integer >= 1, got 0"):
        search(costs, 0)
    with pytest.raises(ScheduleError, match="of memory for each stage; got 1"):
        Costs([(1.0, 1.0, 1.0)], [])
    with pytest.raises(ScheduleError, match="has times of 2 stages, but its wiring has 3"):
        replace(costs, wiring=chain_of((1, 1)))
    with pytest.raises(ScheduleError, match=r"with a wiring cannot be cut further"):
        replace(costs, wiring=chain_of((1,))).in_chunks(2)
