"""What a rank keeps, over an order and over time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.simulation.activation_memory import (
    StageMemory,
    memory_over_time,
    peak_memory,
)
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.timeline import Span, Timeline
from tests.pipeline.tables import most_alive, schedule_of, seconds, small


def test_each_kind_of_action() -> None:
    """F adds what it saves; I swaps that for what it defers; W and B let go."""
    schedule = schedule_of("0F0 0I0 0F1 0W0 0B1", stages=1, microbatches=2)
    sizes = [StageMemory(saved=4.0, deferred=3.0)]
    timeline = simulate(schedule, seconds(1, 1, 1))
    steps = [(0.0, 0.0), (0.0, 4.0), (2.0, 3.0), (2.0, 7.0), (4.0, 4.0), (6.0, 0.0)]
    assert memory_over_time(timeline, sizes, 0) == steps
    assert peak_memory(schedule, sizes) == [7.0]


def test_what_is_deferred_may_be_larger_than_what_was_saved() -> None:
    """It is there while I makes it, so it counts from the start of I."""
    schedule = schedule_of("0F0 0I0 0W0", stages=1, microbatches=1)
    sizes = [StageMemory(saved=2.0, deferred=5.0)]
    timeline = simulate(schedule, seconds(1, 1, 1))
    assert memory_over_time(timeline, sizes, 0) == [(0.0, 0.0), (0.0, 2.0), (1.0, 5.0), (3.0, 0.0)]
    assert peak_memory(schedule, sizes) == [5.0]


def test_a_weight_gradient_in_slices_lets_go_once() -> None:
    texts = ["0F0", "0I0", "0W0", "0F1", "0W0"]
    spans = [Span(0, Action.parse(text), at, at + 1.0) for at, text in enumerate(texts)]
    curve = memory_over_time(Timeline(1, tuple(spans)), [StageMemory(saved=4.0, deferred=3.0)], 0)
    assert curve == [(0.0, 0.0), (0.0, 4.0), (2.0, 3.0), (3.0, 7.0), (5.0, 4.0)]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 8))
def test_order_and_time_agree(name: str, ranks: int, microbatches: int) -> None:
    schedule = small(name, ranks, microbatches)
    sizes = [StageMemory(3.0 + stage, 2.0 + stage) for stage in range(schedule.stages)]
    timeline = simulate(schedule, seconds(3, 2, 1))
    for rank, peak in enumerate(peak_memory(schedule, sizes)):
        curve = memory_over_time(timeline, sizes, rank)
        assert max(size for _, size in curve) == peak
        assert curve[-1][1] == 0.0
    ones = [StageMemory(1.0, 1.0)] * (schedule.stages)
    assert peak_memory(schedule, ones) == most_alive(schedule)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_impossible_sizes_are_refused(value: float) -> None:
    with pytest.raises(ScheduleError, match="saved must be a finite number >= 0, got"):
        StageMemory(value, 0.0)
    with pytest.raises(ScheduleError, match="deferred must be a finite number >= 0, got"):
        StageMemory(0.0, value)


def test_a_size_for_each_stage() -> None:
    schedule = build("1f1b", 2, 2)
    with pytest.raises(
        ScheduleError, match="expected the memory of each of 2 stages, got that of 1"
    ):
        peak_memory(schedule, [StageMemory(1.0, 1.0)])
