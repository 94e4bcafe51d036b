"""Timelines, what ranks keep over them, and reductions that are part of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.search.search import search
from autosplit.pipeline.simulation.activation_memory import (
    StageMemory,
    levels_of,
    peak_memory,
)
from autosplit.pipeline.simulation.reductions import Reductions, last_weights_by_stage
from autosplit.pipeline.simulation.simulate import Costs, simulate
from autosplit.pipeline.simulation.timeline import Span, Timeline, median_durations
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


def test_what_an_action_did_in_parts_is_one_of_its_step() -> None:
    """Two parts and an F between them; the next step's are another action."""
    first = [span(0, "0W0", 0, 1), span(0, "0F1", 1, 5), span(0, "0W0", 5, 8)]
    second = [span(0, "0W0", 9, 11), span(0, "0W0", 11, 15)]
    assert median_durations([first, second]) == {
        (0, ActionKind.FORWARD): 4.0,
        (0, ActionKind.BACKWARD_WEIGHT): 5.0,
    }


# --- what a rank keeps, over an order -----------------------------------------------


def test_what_is_deferred_may_be_larger_than_what_was_saved() -> None:
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
    with pytest.raises(
        ScheduleError, match="expected the memory of each of 2 stages, got that of 1"
    ):
        peak_memory(schedule, [StageMemory(1.0, 1.0)])


# --- reductions over replicas in simulated steps, and the order of last Ws that lets them start ---


LINK = Link(0.5, 10.0)


def reduced(timeline: Timeline) -> list[tuple[int, str, float, float]]:
    return [
        (span.rank, str(span.action), span.start, span.end)
        for span in timeline.spans
        if span.action.kind is ActionKind.REDUCE_GRAD
    ]


def test_a_stage_is_reduced_behind_its_last_w() -> None:
    """10 bytes take half a second and one more."""
    schedule = build("naive", 2, 1)
    found = simulate(schedule, lambda action: 1.0, reductions=Reductions([10.0, 20.0], LINK))
    alone = simulate(schedule, lambda action: 1.0)
    ends = {s.action.stage: s.end for s in alone.spans if s.action.kind is not ActionKind.FORWARD}
    assert sorted(reduced(found)) == [
        (0, "0REDUCE_GRAD", ends[0], ends[0] + 1.5),
        (1, "1REDUCE_GRAD", ends[1], ends[1] + 2.5),
    ]
    assert found.makespan == max(ends[0] + 1.5, ends[1] + 2.5)
    assert found.bubble_ratio() > alone.bubble_ratio()


def test_buckets_follow_each_other_on_a_link() -> None:
    schedule = build("gpipe", 1, 2, weights="2bp")
    parts = Reductions([40.0], Link(0.0, 10.0), cap=15.0)
    found = simulate(schedule, lambda action: 3.0, reductions=parts)
    # F F I I W W until 18.
    assert [(start, end) for _, _, start, end in reduced(found)] == [
        (18.0, 19.5),
        (19.5, 21.0),
        (21.0, 22.0),
    ]


def test_last_weights_come_stage_by_stage_the_largest_first() -> None:
    row = [Action.parse(text) for text in ("0F0", "2F0", "2I0", "2W0", "0I0", "0W0", "2W1", "0W1")]
    (found,) = last_weights_by_stage([row], {0: 1.0, 2: 8.0})
    assert list(map(str, found)) == ["0F0", "2F0", "2I0", "2W0", "0I0", "2W1", "0W0", "0W1"]
    (other,) = last_weights_by_stage([row], {0: 8.0, 2: 1.0})
    assert list(map(str, other))[-3:] == ["0W0", "0W1", "2W1"]


def test_a_search_places_last_weights_for_what_is_reduced() -> None:
    """A stage that is reduced for long is done first, one with much left to compute last."""
    plain = Costs([(1.0, 1.0, 2.0)] * 4, [StageMemory(1.0, 1.0)] * 4)
    for size, least in (([1.0, 6.0, 6.0, 1.0], 22.0), ([4.0] * 4, 21.0)):
        costs = replace(plain, reductions=Reductions(size, Link(0.0, 1.0)))
        unaware = search(plain, 2, ranks=2, placement=(0, 1, 0, 1))
        aware = search(costs, 2, ranks=2, placement=(0, 1, 0, 1))
        found = costs.timeline(aware).makespan
        assert found <= min(least, costs.timeline(unaware).makespan)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"bytes": [-1.0]}, "the bytes of gradients are 0 or more, got"),
        ({"bytes": [1.0], "cap": 0.0}, "a bucket has more than 0 bytes, got 0"),
    ],
)
def test_what_cannot_be_is_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Reductions(link=LINK, **bad)


def test_a_stage_without_bytes_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 1 is run, but the bytes of 1 stages are given"):
        simulate(build("gpipe", 2, 2), lambda action: 1.0, reductions=Reductions([1.0], LINK))
