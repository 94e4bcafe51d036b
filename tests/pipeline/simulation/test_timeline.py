"""Timelines, and what ranks keep over them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.schedule import Action
from autosplit.pipeline.simulation.activation_memory import (
    StageMemory,
    levels_of,
    peak_memory,
)
from autosplit.pipeline.simulation.simulate import Span, Timeline
from tests.pipeline.tables import most_alive, schedule_of, small

# --- timelines: busy and idle, medians ------------------------------------------------------------


def span(rank: int, text: str, start: float, end: float) -> Span:
    return Span(rank, Action.parse(text), start, end)


MEASURED = Timeline(
    2,
    (
        span(0, "0F0", 10.0, 12.0),
        span(0, "0SEND_F0", 12.0, 12.5),
        span(1, "1RECV_F0", 10.0, 12.5),
        span(1, "1F0", 12.5, 14.5),
        span(1, "1B0", 14.5, 18.0),
    ),
)


def test_bubble_ratio_of_a_rank_and_of_all() -> None:
    assert MEASURED.bubble_ratio(0) == 0.75
    assert MEASURED.bubble_ratio(1) == 0.3125
    assert MEASURED.bubble_ratio() == (0.75 + 0.3125) / 2


@pytest.mark.parametrize("rank", [-1, 2])
def test_an_unknown_rank_is_refused(rank: int) -> None:
    with pytest.raises(ScheduleError, match=f"no rank {rank} in this timeline: expected 0 to 1"):
        MEASURED.busy(rank)
    with pytest.raises(ScheduleError, match=f"no rank {rank} in this timeline"):
        MEASURED.bubble_ratio(rank)


# --- what a rank keeps, over an order -----------------------------------------------


def test_deferred_memory_may_exceed_saved_memory() -> None:
    """It is there while I makes it, so it counts from the start of I."""
    schedule = schedule_of("0F0 0I0 0W0", stages=1, microbatches=1)
    sizes = [StageMemory(saved=2.0, deferred=5.0)]
    assert [*levels_of(schedule, sizes)[0]] == [2.0, 5.0, 5.0]
    assert peak_memory(schedule, sizes) == [5.0]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 8))
def test_peaks_are_the_most_that_is_alive(name: str, ranks: int, microbatches: int) -> None:
    schedule = small(name, ranks, microbatches)
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
    with pytest.raises(ScheduleError, match="expected one StageMemory for each of 2 stages, got 1"):
        peak_memory(schedule, [StageMemory(1.0, 1.0)])
