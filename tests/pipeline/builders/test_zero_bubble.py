"""ZB-H1 and ZB-H2: what they run, and their bubble and memory as published."""

from __future__ import annotations

import dataclasses

import pytest

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.simulation.simulate import simulate
from tests.pipeline.tables import most_alive, rows_of, seconds

TIMES = [(1.0, 1.0, 1.0), (18.5, 18.1, 9.3), (29.7, 29.4, 19.9), (1.0, 2.0, 1.0)]


def test_zb_h1() -> None:
    assert rows_of(build("zb-h1", 3, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_h2() -> None:
    schedule = build("zb-h2", 3, 6)
    assert rows_of(schedule) == [
        "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0I2 0W1 0W2 0I3 0I4 0W3 0W4 0I5 0W5",
        "1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1I4 1W1 1W2 1I5 1W3 1W4 1W5",
        "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5",
    ]
    assert schedule.crosses_step


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 2), (4, 4), (4, 9), (8, 16)])
def test_zb_h1_bubble_and_memory(
    times: tuple[float, float, float], ranks: int, microbatches: int
) -> None:
    forward, inputs, weights = times
    schedule = build("zb-h1", ranks, microbatches, times=times)
    bubble = (ranks - 1) * (forward + inputs - weights)
    step = simulate(schedule, seconds(*times)).step_time
    assert step == pytest.approx(microbatches * sum(times) + bubble)
    assert max(most_alive(schedule)) == ranks


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 3), (4, 7), (4, 9), (8, 16)])
def test_zb_h2_bubble_and_memory(
    times: tuple[float, float, float], ranks: int, microbatches: int
) -> None:
    forward, inputs, weights = times
    schedule = build("zb-h2", ranks, microbatches, times=times)
    bubble = (ranks - 1) * (forward + inputs - 2 * weights)
    timeline = simulate(schedule, seconds(*times))
    assert timeline.step_time == pytest.approx(microbatches * sum(times) + bubble)
    assert timeline.bubble_ratio() == pytest.approx(bubble / timeline.step_time)
    assert max(most_alive(schedule)) == 2 * ranks - 1


def test_zb_h2_gains_only_where_steps_overlap() -> None:
    """With a wait for all ranks between steps, F = I = W costs N-1 units, as ZB-H1 does."""
    schedule = build("zb-h2", 4, 8)
    unit = seconds(1, 1, 1)
    assert simulate(schedule, unit).step_time == 24
    assert simulate(schedule, unit).makespan == 27
    waiting = dataclasses.replace(schedule, crosses_step=False)
    assert simulate(waiting, unit).step_time == 27
    assert simulate(build("zb-h1", 4, 8), unit).step_time == 27


def test_a_step_that_crosses_fits_into_the_last_one() -> None:
    """Two steps in one simulation: the second ends one step time after the first."""
    once = build("zb-h2", 4, 8, times=(18.5, 18.1, 9.3))
    twice = dataclasses.replace(
        once,
        microbatches=16,
        ranks=tuple(
            row + tuple(dataclasses.replace(each, microbatch=each.microbatch + 8) for each in row)
            for row in once.ranks
        ),
    )
    durations = seconds(18.5, 18.1, 9.3)
    one, two = simulate(once, durations), simulate(twice, durations)
    assert two.makespan - one.makespan == pytest.approx(one.step_time)
