"""DualPipe, DualPipeV and Chimera: what they run, and their bubble and memory."""

from __future__ import annotations

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.validation.validate import validate
from tests.pipeline.tables import most_alive, rows_of, seconds


def test_one_copy_in_a_v() -> None:
    schedule = build("dualpipe-v", 4, 4)
    assert schedule.placement == (0, 1, 1, 0)
    assert rows_of(schedule) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


def test_two_copies() -> None:
    schedule = build("dualpipe", 2, 4)
    assert (schedule.placement, schedule.mirror) == ((0, 1), (1, 0))
    assert rows_of(schedule) == [
        "0F0 1F1 0F2 1B1 1F3 0B0 1B3 0I2 0W2",
        "0F1 1F0 0F3 1B0 1F2 0B1 1B2 0I3 0W3",
    ]


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (18.5, 18.1, 9.3)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bubble_and_memory(times: tuple[float, float, float], ranks: int) -> None:
    forward, inputs, weights = times
    for count in (2 * ranks, 3 * ranks):
        bent, crossed = build("dualpipe-v", 2 * ranks, count), build("dualpipe", ranks, count)
        for schedule, turns in ((bent, ranks - 1), (crossed, ranks // 2 - 1)):
            idle = simulate(schedule, seconds(*times)).bubble_ratio() * (
                simulate(schedule, seconds(*times)).makespan
            )
            assert idle == pytest.approx(
                turns * (forward + inputs - weights), abs=1e-6 * idle + 1e-9
            )
        assert max(most_alive(bent)) == 2 * ranks + 1
        assert max(most_alive(crossed)) == ranks + 1


def test_counts_that_do_not_fit() -> None:
    with pytest.raises(ScheduleError, match="expected 4 or more for 2 ranks, got 3"):
        build("dualpipe-v", 4, 3)
    for ranks, count in ((3, 6), (2, 5), (2, 2)):
        with pytest.raises(ScheduleError, match=f"got {ranks} ranks and {count} microbatches"):
            build("dualpipe", ranks, count)
    with pytest.raises(ScheduleError, match="it knows: none, for it places its own"):
        build("dualpipe", 2, 4, weights="fill")
    with pytest.raises(ScheduleError, match="times has no meaning with 'dualpipe'"):
        build("dualpipe", 2, 4, times=(1, 1, 1))


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
def test_chimera_bubble_and_memory(ranks: int, units: int) -> None:
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


def test_counts_that_do_not_fit_chimera() -> None:
    for ranks, count in ((3, 4), (4, 3)):
        with pytest.raises(ScheduleError, match=f"got {ranks} ranks and {count} microbatches"):
            build("chimera", ranks, count)
    validate(build("chimera", 4, 6))  # a unit and a half
