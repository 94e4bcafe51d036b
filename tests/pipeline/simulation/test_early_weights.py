"""Weight gradients in waits, in the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.timeline import Timeline
from tests.pipeline.tables import schedule_of, seconds

LATE = schedule_of("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")


def row_of(timeline: Timeline, rank: int) -> list[str]:
    spans = (span for span in timeline.spans if span.rank == rank)
    return [f"{span.action} {span.start:g}-{span.end:g}" for span in spans]


def test_a_wait_is_filled_with_what_can_run() -> None:
    """Rank 0 waits for 1I1 from 4 to 5; a whole W makes 0I1 late, half of one fits."""
    times = seconds(1, 1, 2)
    plain = ["0F0 0-1", "0F1 1-2", "0I0 3-4", "0I1 5-6"]
    assert row_of(simulate(LATE, times), 0) == [*plain, "0W0 6-8", "0W1 8-10"]
    whole = simulate(LATE, times, early_weights=True)
    assert row_of(whole, 0) == [*plain[:3], "0W0 4-6", "0I1 6-7", "0W1 7-9"]
    halves = simulate(LATE, times, early_weights=True, slices=2)
    assert row_of(halves, 0) == [
        *plain[:3],
        "0W0 4-5",
        "0I1 5-6",
        "0W0 6-7",
        "0W1 7-8",
        "0W1 8-9",
    ]


def test_slices_may_differ_and_replace_the_whole() -> None:
    found = simulate(LATE, seconds(1, 1, 2), early_weights=True, slices={0: (0.25, 2.0)})
    assert row_of(found, 0)[3:6] == ["0W0 4-4.25", "0W0 4.25-6.25", "0I1 6.25-7.25"]
    assert row_of(found, 1)[-2:] == ["1W0 5-7", "1W1 7-9"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slices": 2}, "slices=2 has no effect without early_weights=True"),
        ({"slices": 0, "early_weights": True}, "slices is a count, 1 or more; got 0"),
        ({"slices": {1: ()}, "early_weights": True}, "each slice of a W of stage 1, .* got"),
        ({"slices": {0: (-1.0,)}, "early_weights": True}, "finite numbers >= 0, got"),
    ],
)
def test_impossible_slices_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(LATE, seconds(1, 1, 1), **options)


def test_a_deadlock_is_one_with_early_weights_too() -> None:
    stuck = schedule_of("0F0 0I0 0W0 0F1 0I1 0W1", "1F1 1F0 1I0 1W0 1I1 1W1")
    with pytest.raises(ScheduleError, match="cannot run to its end"):
        simulate(stuck, seconds(1, 1, 1), early_weights=True)
