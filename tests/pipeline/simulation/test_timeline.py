from __future__ import annotations

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.simulation.timeline import Span, Timeline, median_durations


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
