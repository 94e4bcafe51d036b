"""Orders of microbatches of different sizes: short, legal, within their cap, found again."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.pipeline.search.microbatch_order import MicrobatchOrders
from autosplit.pipeline.search.search import named_schedules
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs, simulate
from autosplit.pipeline.validation.communicators import find_deadlock
from autosplit.pipeline.validation.programs import engine_programs
from autosplit.pipeline.validation.validate import validate

PLACEMENTS = [(0,), (0, 1), (0, 1, 2, 3), (0, 0, 1), (0, 1, 1, 0), (0, 1, 0, 1)]
FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = map(ActionKind, "FIW")


def orders_on(placement: Sequence[int]) -> MicrobatchOrders:
    return MicrobatchOrders(placement, [(1.0, 1.0, 1.0)] * len(placement))


def costs_by_length(lengths: Sequence[int], stages: int) -> list[Costs]:
    """One of each stage's seconds and bytes for a token, the first without I."""
    rows = []
    for n in lengths:
        memory = StageMemory(float(n), 0.75 * n)
        times = [(float(n), 0.0, 2.0 * n), *[(float(n), 1.25 * n, 0.75 * n)] * (stages - 1)]
        rows.append(Costs(times, [memory] * stages))
    return rows


def step_of(schedule: Schedule, costs: Sequence[Costs]) -> float:
    return simulate(schedule, lambda action: costs[action.microbatch].seconds(action)).makespan


def peaks_of(schedule: Schedule, costs: Sequence[Costs]) -> list[float]:
    """The most bytes of each rank, action by action."""
    peaks = []
    for row in schedule.ranks:
        level = peak = 0.0
        for action in row:
            change = costs[action.microbatch].memory[action.stage].change(action.kind)
            peak = max(peak, level + change.allocated)
            level += change.allocated - change.freed
        peaks.append(peak)
    return peaks


def in_order(schedule: Schedule, order: Sequence[int]) -> Schedule:
    rows = tuple(
        tuple(replace(action, microbatch=order[action.microbatch]) for action in row)
        for row in schedule.ranks
    )
    return replace(schedule, ranks=rows)


@cache
def interleavings(forwards: int, inputs: int, weights: int) -> list[str]:
    """All rows of F, I and W in which no I comes before its F, and no W before its I."""
    if not forwards + inputs + weights:
        return [""]
    rows = []
    if forwards:
        rows += ["F" + row for row in interleavings(forwards - 1, inputs, weights)]
    if inputs > forwards:
        rows += ["I" + row for row in interleavings(forwards, inputs - 1, weights)]
    if weights > inputs:
        rows += ["W" + row for row in interleavings(forwards, inputs, weights - 1)]
    return rows


def rows_on(stage: int, count: int) -> Iterator[tuple[Action, ...]]:
    for text in interleavings(count, count, count):
        at = {kind: iter(range(count)) for kind in "FIW"}
        yield tuple(Action(stage, ActionKind(kind), next(at[kind])) for kind in text)


def end_of(rows: Sequence[Sequence[Action]], costs: Sequence[Costs]) -> float:
    """When two ranks have run their rows; infinite if they wait for each other."""
    ends: dict[Action, float] = {}
    clocks, places = [0.0, 0.0], [0, 0]
    while sum(places) < sum(map(len, rows)):
        for rank, row in enumerate(rows):
            if places[rank] < len(row):
                action = row[places[rank]]
                other = replace(action, stage=1 - rank)
                waits = action.kind is (BACKWARD_INPUT if rank == 0 else FORWARD)
                if not waits or other in ends:
                    break
        else:
            return math.inf
        start = max(clocks[rank], ends[other] if waits else 0.0)
        clocks[rank] = ends[action] = start + costs[action.microbatch].seconds(action)
        places[rank] += 1
    return max(clocks)


def shortest(costs: Sequence[Costs], cap: float) -> float:
    """The shortest step over two ranks with one order of microbatches, by trying all."""
    count, best = len(costs), math.inf
    for rows in product(rows_on(0, count), rows_on(1, count)):
        for order in permutations(range(count)):
            listed = [costs[microbatch] for microbatch in order]
            schedule = Schedule("", 2, count, rows, (0, 1), True)
            if math.isinf(cap) or max(peaks_of(schedule, listed)) <= cap:
                best = min(best, end_of(rows, listed))
    return best


@pytest.mark.parametrize(
    ("lengths", "cap"), [((1, 5), math.inf), ((4, 2), 4.0), ((1, 6, 3), math.inf), ((3, 5, 2), 7.0)]
)
def test_hardly_longer_than_the_shortest(lengths: tuple[int, ...], cap: float) -> None:
    costs = costs_by_length(lengths, 2)
    step = step_of(orders_on((0, 1)).find(costs, cap), costs)
    assert (1 - 1e-9) * (best := shortest(costs, cap)) <= step <= 1.03 * best


@st.composite
def lists(draw: st.DrawFn, stages: int) -> list[Costs]:
    """Whatever costs: those of a microbatch need not grow on all stages alike."""
    number = st.integers(0, 6).map(float)
    times = st.tuples(number, number, number)
    memory = st.builds(StageMemory, st.integers(1, 4).map(float), st.integers(0, 5).map(float))
    row = st.builds(
        Costs,
        st.lists(times, min_size=stages, max_size=stages),
        st.lists(memory, min_size=stages, max_size=stages),
    )
    return draw(st.lists(row, min_size=1, max_size=6))


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(PLACEMENTS), st.sampled_from([6.0, 12.0, math.inf]))
def test_drawn_lists(data: st.DataObject, placement: tuple[int, ...], cap: float) -> None:
    """Legal, proved to end, within the cap, in one order, and found again."""
    costs = data.draw(lists(len(placement)))
    try:
        schedule = orders_on(placement).find(costs, cap)
    except ScheduleError:
        largest = max(max(size.saved, size.deferred) for row in costs for size in row.memory)
        assert largest > cap or len({*placement}) < len(placement)
        return
    validate(schedule)
    assert find_deadlock(engine_programs(schedule)) is None
    assert max(peaks_of(schedule, costs)) <= cap * (1 + 1e-6)
    orders = {
        (tuple(action.microbatch for action in row if (action.stage, action.kind) == (stage, kind)))
        for row in schedule.ranks
        for stage in range(len(placement))
        for kind in (FORWARD, BACKWARD_WEIGHT)
    } - {()}
    assert len(orders) == 1
    assert orders_on(list(placement)).find([*costs], [cap] * (max(placement) + 1)) == schedule


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=9), st.sampled_from([60.0, math.inf]))
def test_never_longer_than_a_named_schedule(lengths: list[int], cap: float) -> None:
    costs, stages = costs_by_length(lengths, 3), 3
    step = step_of(orders_on(range(stages)).find(costs, cap), costs)
    given_order = [*range(len(lengths))]
    ascending = sorted(given_order, key=lengths.__getitem__)
    for named in named_schedules([(1.0, 1.0, 1.0)] * stages, len(lengths), stages):
        for order in (given_order, ascending):
            ordered = in_order(named, order)
            if named.name != "naive" and max(peaks_of(ordered, costs)) <= cap:
                assert step <= step_of(ordered, costs) * 1.0101, named.name


def test_a_list_in_a_bad_order_takes_less_than_with_any_named_schedule() -> None:
    lengths = [8, 1, 9, 2, 7, 1, 8, 3]
    costs = costs_by_length(lengths, 4)
    schedule = orders_on(range(4)).find(costs, 24.0)
    named = named_schedules([(1.0, 1.0, 1.0)] * 4, len(lengths), 4)
    steps = [step_of(s, costs) for s in named if max(peaks_of(s, costs)) <= 24.0]
    assert step_of(schedule, costs) < 0.9 * min(steps)


def test_ranks_wait_for_long_microbatches() -> None:
    """Ranks that always start what they can take 0.98 of the time of a sorted list."""
    source = random.Random(14)
    lengths = sorted(round(source.lognormvariate(3.0, 1.0)) for _ in range(24))
    costs = costs_by_length(lengths, 8)
    step = step_of(orders_on(range(8)).find(costs), costs)
    steps = [step_of(s, costs) for s in named_schedules([(1.0, 1.0, 1.0)] * 8, 24, 8)]
    assert step < 0.96 * min(steps)


def test_bad_lists_are_refused() -> None:
    orders = orders_on((0, 1))
    with pytest.raises(ScheduleError, match="got an empty list: pass costs of"):
        orders.find([])
    text = "limit of 6: microbatch 1, the largest, keeps 9 on one stage. Cut it into smaller ones"
    with pytest.raises(ScheduleError, match=text):
        orders.find(costs_by_length([5, 9, 2], 2), 6.0)
    with pytest.raises(ScheduleError, match="a number for each of 2 ranks"):
        orders.find(costs_by_length([5], 2), [6.0])
