"""Timelines: busy and idle, medians, the critical path."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.timeline import Span, Timeline, critical_path, median_durations
from tests.pipeline.tables import schedule_of, seconds, small


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


def test_makespan_runs_from_first_start_to_last_end() -> None:
    assert MEASURED.makespan == 8.0


def test_busy_counts_computing_only() -> None:
    assert MEASURED.busy(0) == 2.0
    assert MEASURED.busy(1) == 5.5


def test_bubble_ratio_of_a_rank_and_of_all() -> None:
    assert MEASURED.bubble_ratio(0) == 0.75
    assert MEASURED.bubble_ratio(1) == 0.3125
    assert MEASURED.bubble_ratio() == (0.75 + 0.3125) / 2


def test_a_rank_without_spans_idles() -> None:
    timeline = Timeline(2, (span(0, "0F0", 0.0, 1.0),))
    assert timeline.bubble_ratio(1) == 1.0
    assert timeline.bubble_ratio() == 0.5


def test_an_empty_timeline_has_no_bubble() -> None:
    assert Timeline(2, ()).makespan == 0.0
    assert Timeline(2, ()).bubble_ratio() == 0.0


@pytest.mark.parametrize("rank", [-1, 2])
def test_an_unknown_rank_is_refused(rank: int) -> None:
    with pytest.raises(ScheduleError, match=f"no rank {rank} in this timeline: expected 0 to 1"):
        MEASURED.busy(rank)
    with pytest.raises(ScheduleError, match=f"no rank {rank} in this timeline"):
        MEASURED.bubble_ratio(rank)


def test_the_slices_of_a_weight_gradient_are_one_action_of_their_step() -> None:
    """Two slices and an F between them; the next step's are another action."""
    first = [span(0, "0W0", 0, 1), span(0, "0F1", 1, 5), span(0, "0W0", 5, 8)]
    second = [span(0, "0W0", 9, 11), span(0, "0W0", 11, 15)]
    assert median_durations([first, second]) == {
        (0, ActionKind.FORWARD): 4.0,
        (0, ActionKind.BACKWARD_WEIGHT): 5.0,
    }


def test_through_both_ranks() -> None:
    schedule = schedule_of("0F0 0I0 0W0", "1F0 1I0 1W0", microbatches=1)
    path = critical_path(simulate(schedule, seconds(1, 2, 4), transfer=0.5))
    assert [str(span.action) for span in path] == ["0F0", "1F0", "1I0", "0I0", "0W0"]


def test_a_busy_rank_is_its_own_path() -> None:
    path = critical_path(simulate(build("1f1b", 1, 2), seconds(1, 1, 1)))
    assert [str(span.action) for span in path] == ["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]


def test_nothing_ran() -> None:
    assert critical_path(Timeline(1, ())) == ()


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_its_actions_and_transfers_fill_the_step(
    name: str, ranks: int, microbatches: int, moving: bool
) -> None:
    schedule = small(name, ranks, microbatches)
    transfer = 0.25 if moving else 0.0
    timeline = simulate(schedule, seconds(3, 2, 1), transfer=transfer)
    path = critical_path(timeline)
    assert path[0].start == 0.0
    crossings = sum(one.rank != other.rank for one, other in itertools.pairwise(path))
    working = sum(span.end - span.start for span in path)
    assert timeline.makespan == pytest.approx(working + transfer * crossings)
