"""Chimera: what it runs, its bubble and its memory."""

from __future__ import annotations

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.validation.validate import validate
from tests.pipeline.tables import most_alive, rows_of, seconds


def test_two_ways_through_four_ranks() -> None:
    schedule = build("chimera", 4, 4, split_backward=False)
    assert (schedule.placement, schedule.mirror) == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert rows_of(schedule) == [
        "0F0 0F2 3F1 3B1 3F3 3B3 0B0 0B2",
        "1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2",
        "1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3",
        "0F1 0F3 3F0 3B0 3F2 3B2 0B1 0B3",
    ]


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("units", [1, 3])
def test_bubble_and_memory(ranks: int, units: int) -> None:
    count = ranks * units
    fused = build("chimera", ranks, count, split_backward=False)
    validate(fused)
    for forward, backward in ((1.0, 1.0), (1.0, 2.0)):
        step = simulate(fused, seconds(forward, backward / 2, backward / 2)).makespan
        idle = step - count * (forward + backward)
        assert idle == pytest.approx(units * (ranks - 2) * backward)
    assert most_alive(fused)[0] == ranks // 2 + 1
    assert max(most_alive(fused)) == ranks
    split = build("chimera", ranks, count)
    validate(split)
    step = simulate(split, seconds(1.0, 1.0, 1.0)).makespan
    assert step - 3 * count == pytest.approx(ranks / 2 - 1)
    assert max(most_alive(split)) <= ranks


def test_counts_that_do_not_fit() -> None:
    for ranks, count in ((3, 4), (4, 3)):
        with pytest.raises(ScheduleError, match=f"got {ranks} ranks and {count} microbatches"):
            build("chimera", ranks, count)
    validate(build("chimera", 4, 6))  # a unit and a half
