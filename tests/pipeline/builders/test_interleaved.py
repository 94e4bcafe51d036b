"""Interleaved 1F1B: what it runs, and its bubble and memory as published."""

from __future__ import annotations

import pytest

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.simulation.simulate import simulate
from tests.pipeline.tables import most_alive, rows_of, seconds


def test_two_stages_a_rank() -> None:
    schedule = build("interleaved", 4, 4, ranks=2, split_backward=False)
    assert schedule.placement == (0, 1, 0, 1)
    assert rows_of(schedule) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_split() -> None:
    assert rows_of(build("interleaved", 4, 4, ranks=2)) == [
        "0F0 0F1 2F0 2F1 0F2 2I0 2W0 0F3 2I1 2W1 2F2 0I0 "
        "0W0 2F3 0I1 2I2 0W1 2W2 2I3 0I2 0I3 2W3 0W2 0W3",
        "1F0 1F1 3F0 3I0 3F1 3I1 1F2 1I0 3W0 1F3 1I1 3W1 "
        "3F2 3I2 1W0 3F3 3I3 1I2 1I3 1W1 3W2 3W3 1W2 1W3",
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
def test_bubble_and_memory(chunks: int, ranks: int, rounds: int) -> None:
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
