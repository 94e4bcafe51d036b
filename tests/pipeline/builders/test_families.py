"""Families of schedules: what they run, and their bubble and memory as published."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.builders.v_shape import v_shape
from autosplit.pipeline.simulation.simulate import simulate
from tests.pipeline.tables import most_alive, rows_of, seconds

# --- interleaved 1F1B, ZB-H1 and ZB-H2: what they run, and their bubble and memory as published ---


TIMES = [(1.0, 1.0, 1.0), (18.5, 18.1, 9.3), (1.0, 1.0, 0.5)]


def test_zb_h2() -> None:
    schedule = build("zb-h2", 3, 6)
    assert rows_of(schedule) == [
        "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0I2 0W1 0W2 0I3 0I4 0W3 0W4 0I5 0W5",
        "1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1I4 1W1 1W2 1I5 1W3 1W4 1W5",
        "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5",
    ]
    assert schedule.crosses_step


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(
    ("name", "chunks", "hidden", "alive", "counts"),
    [
        ("zb-h1", 1, 1, lambda n: n, [(1, 2), (4, 9), (8, 16)]),
        ("zb-h2", 1, 2, lambda n: 2 * n - 1, [(1, 2), (4, 7), (8, 16)]),
        ("dualpipe-v", 2, 1, lambda n: 2 * n + 1, [(2, 4), (4, 12), (8, 24)]),
    ],
)
def test_published_bubble_and_memory(
    name: str,
    chunks: int,
    hidden: int,
    alive: Callable[[int], int],
    counts: list[tuple[int, int]],
    times: tuple[float, float, float],
) -> None:
    """(N - 1) (F + I - W), or - 2W, and the most that is alive on a rank."""
    forward, inputs, weights = times
    for ranks, microbatches in counts:
        options = {"times": times} if chunks == 1 else {}
        schedule = build(name, chunks * ranks, microbatches, **options)
        bubble = (ranks - 1) * (forward + inputs - hidden * weights)
        timeline = simulate(schedule, seconds(*times))
        assert timeline.step_time == pytest.approx(chunks * microbatches * sum(times) + bubble)
        assert timeline.bubble_ratio() == pytest.approx(bubble / timeline.step_time, abs=1e-9)
        assert max(most_alive(schedule)) == alive(ranks)


def test_a_step_that_crosses_fits_into_the_last_one() -> None:
    """Two steps in one simulation: the second ends one step time after the first."""
    once = build("zb-h2", 4, 8, times=(18.5, 18.1, 9.3))
    twice = dataclasses.replace(
        once,
        microbatches=16,
        ranks=tuple(
            row + tuple(dataclasses.replace(item, microbatch=item.microbatch + 8) for item in row)
            for row in once.ranks
        ),
    )
    durations = seconds(18.5, 18.1, 9.3)
    one, two = simulate(once, durations), simulate(twice, durations)
    assert two.makespan - one.makespan == pytest.approx(one.step_time)


def test_interleaved_split() -> None:
    assert rows_of(build("interleaved", 4, 4, ranks=2)) == [
        "0F0 0F1 2F0 2F1 0F2 2I0 2W0 0F3 2I1 2W1 2F2 0I0 "
        "0W0 2F3 0I1 2I2 0W1 2W2 2I3 0I2 0I3 2W3 0W2 0W3",
        "1F0 1F1 3F0 3I0 3F1 3I1 1F2 1I0 3W0 1F3 1I1 3W1 "
        "3F2 3I2 1W0 3F3 3I3 1I2 1I3 3W2 3W3 1W1 1W2 1W3",
    ]


def test_groups_are_as_even_as_can_be() -> None:
    """Seven microbatches on three ranks go round as four and three."""
    row = build("interleaved", 6, 7, ranks=3, split_backward=False).ranks[2]
    forwards = [str(action) for action in row if action.kind.value == "F"]
    assert forwards == [
        *("2F0", "2F1", "2F2", "2F3", "5F0", "5F1", "5F2", "5F3"),
        *("2F4", "2F5", "2F6", "5F4", "5F5", "5F6"),
    ]


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "rounds"), [(1, 2), (2, 2), (4, 1), (4, 3)])
def test_interleaved_bubble_and_memory(chunks: int, ranks: int, rounds: int) -> None:
    stages, count = ranks * chunks, ranks * rounds
    fused = build("interleaved", stages, count, ranks=ranks, split_backward=False)
    times = (18.5, 18.1, 9.3)
    work = count * chunks * sum(times)
    step = simulate(fused, seconds(*times)).makespan
    assert step == pytest.approx(work + (ranks - 1) * sum(times))
    split = build("interleaved", stages, count, ranks=ranks)
    assert simulate(split, seconds(1, 1, 1)).makespan == 3 * count * chunks + ranks - 1
    if rounds > 1:
        expected = [(chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1 for rank in range(ranks)]
        assert most_alive(fused) == expected
        assert max(most_alive(split)) <= expected[0]


def test_counts_that_do_not_fit() -> None:
    with pytest.raises(ScheduleError, match="expected 4 or more for 2 ranks, got 3"):
        build("dualpipe-v", 4, 3)
    with pytest.raises(ScheduleError, match="known: none, because it places its own"):
        build("dualpipe-v", 4, 4, weights="fill")
    with pytest.raises(ScheduleError, match="times has no meaning with 'dualpipe-v'"):
        build("dualpipe-v", 4, 4, times=(1, 1, 1))


# --- ZB-V, V-Half and V-Min: what they run, and their bubble and memory as published --------------


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


@pytest.mark.parametrize("ranks", [2, 5, 6])
@pytest.mark.parametrize("rounds", [1, 3])
def test_bubbles(ranks: int, rounds: int) -> None:
    count = rounds * ranks
    assert bubble("zb-v", ranks, count) == ranks - 1
    assert bubble("v-half", ranks, count) == 3 * (ranks - 1) - ranks % 2
    assert bubble("v-min", ranks, count) == 4 * (ranks - 1) + (1 if ranks % 3 == 0 else -1)


@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
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


def test_distances_that_do_not_repeat_are_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        v_shape(8, 2, (1, 1, 2, 2))
    assert str(caught.value) == (
        "no block of passes with the distances (1, 1, 2, 2) repeats every 6 slots on 8 ranks: "
        "use the distances of 'zb-v', 'v-half' or 'v-min'"
    )
