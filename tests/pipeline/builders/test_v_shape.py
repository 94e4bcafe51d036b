"""ZB-V, V-Half and V-Min: what they run, and their bubble and memory as published."""

from __future__ import annotations

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.builders.v_shape import v_shape
from autosplit.pipeline.simulation.simulate import simulate
from tests.pipeline.tables import most_alive, rows_of, seconds


def test_zb_v() -> None:
    schedule = build("zb-v", 4, 4)
    assert schedule.placement == (0, 1, 1, 0)
    assert rows_of(schedule) == [
        "0F0 0F1 3F0 3I0 0F2 3W0 3F1 3I1 0I0 3W1 0F3 0W0 "
        "3F2 3I2 0I1 3W2 3F3 3I3 0I2 0W1 0I3 3W3 0W2 0W3",
        "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 "
        "2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3",
    ]


def test_v_half() -> None:
    assert rows_of(build("v-half", 6, 3)) == [
        "0F0 0F1 5F0 5I0 0F2 5W0 5F1 5I1 5W1 0I0 0W0 5F2 5I2 0I1 5W2 0W1 0I2 0W2",
        "1F0 4F0 1F1 4I0 4F1 4W0 1F2 1I0 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2",
        "2F0 3F0 2F1 3F1 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2",
    ]


def test_v_min() -> None:
    assert rows_of(build("v-min", 6, 3)) == [
        "0F0 5F0 0F1 5I0 5W0 5F1 0F2 0I0 5I1 0W0 5W1 5F2 0I1 5I2 0W1 5W2 0I2 0W2",
        "1F0 4F0 1F1 4I0 4W0 4F1 1I0 1F2 1W0 4I1 4F2 4W1 1I1 1W1 4I2 4W2 1I2 1W2",
        "2F0 3F0 2F1 3F1 3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2",
    ]


def bubble(name: str, ranks: int, microbatches: int) -> float:
    """Idle time of each rank for F = I = W = 1 of one stage."""
    schedule = build(name, 2 * ranks, microbatches)
    return simulate(schedule, seconds(1, 1, 1)).makespan - 6 * microbatches


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 8, 9])
@pytest.mark.parametrize("rounds", [1, 3])
def test_bubbles(ranks: int, rounds: int) -> None:
    count = rounds * ranks
    assert bubble("zb-v", ranks, count) == ranks - 1
    assert bubble("v-half", ranks, count) == 3 * (ranks - 1) - ranks % 2
    assert bubble("v-min", ranks, count) == 4 * (ranks - 1) + (1 if ranks % 3 == 0 else -1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 8, 9, 12])
def test_memory(ranks: int) -> None:
    """In pairs of a stage and a microbatch, of which 1F1B has 2P on its first rank."""
    for name, most in (
        ("zb-v", 2 * ranks),
        ("v-half", 2 * (ranks // 2 + 1)),
        ("v-min", 2 * -(-(ranks + 2) // 3)),
    ):
        schedule = build(name, 2 * ranks, 3 * ranks)
        assert max(most_alive(schedule)) == most
        uneven = build(name, 2 * ranks, 3 * ranks, times=(18.5, 18.1, 9.3))
        assert max(most_alive(uneven)) <= most


def test_zb_v_keeps_its_bubble_when_weights_are_short() -> None:
    """W is half of F: idle stays near a fifth of 1F1B's, whatever M."""
    times = (18.5, 18.1, 9.3)
    for microbatches in (8, 24):
        step = simulate(build("zb-v", 16, microbatches, times=times), seconds(*times)).makespan
        idle = step - 2 * microbatches * sum(times)
        assert idle < 0.23 * 2 * 7 * sum(times)


def test_distances_that_do_not_repeat_are_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        v_shape(8, 2, (1, 1, 2, 2))
    assert str(caught.value) == (
        "no block of passes with the distances (1, 1, 2, 2) repeats every 6 slots on 8 ranks"
    )
