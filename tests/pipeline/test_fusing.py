"""Adjacent I and W as one B."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import rows_of, schedule_of, seconds, small

from autosplit.pipeline.action import ActionKind
from autosplit.pipeline.fusing import fuse_adjacent
from autosplit.pipeline.schedules import SCHEDULES
from autosplit.pipeline.simulate import simulate
from autosplit.pipeline.validate import validate

SPLIT = schedule_of("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1")


def test_all_pairs() -> None:
    assert rows_of(fuse_adjacent(SPLIT)) == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def test_only_pairs_of_one_microbatch_and_stage() -> None:
    apart = schedule_of("0F0 0I0 0F1 0W0 0I1 1F0 1I0 1W0 0W1 1F1 1I1 1W1", placement=(0, 0))
    assert rows_of(fuse_adjacent(apart)) == ["0F0 0I0 0F1 0W0 0I1 1F0 1B0 0W1 1F1 1B1"]


def test_nobody_waits_longer() -> None:
    """Rank 0 waits for 1I0 and 1I1, and nobody for its own Is."""
    fused = fuse_adjacent(SPLIT, seconds(1, 1, 1))
    assert rows_of(fused) == ["0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    assert simulate(fuse_adjacent(SPLIT), seconds(1, 1, 1)).makespan == 9
    assert simulate(fused, seconds(1, 1, 1)).makespan == 8


def test_a_whole_backward_takes_its_own_time() -> None:
    """1I0 is waited for one second after it ends: enough for a B of 3, not for one of I and W.

    Nobody waits for stage 0's, but a B longer than both would hold up its own rank.
    """
    times = {(s, k): 2.0 for s in (0, 1) for k in ActionKind if k is not ActionKind.BACKWARD}
    times[0, ActionKind.FORWARD], times[1, ActionKind.FORWARD] = 4.0, 1.0
    halves = ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    whole = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1 1W1"]
    assert rows_of(fuse_adjacent(SPLIT, times)) == [whole[0], halves[1]]
    short = {**times, (1, ActionKind.BACKWARD): 3.0}
    assert rows_of(fuse_adjacent(SPLIT, short)) == whole
    long = {**short, (0, ActionKind.BACKWARD): 6.0}
    assert rows_of(fuse_adjacent(SPLIT, long)) == [halves[0], whole[1]]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([0, 0.5]),
)
def test_every_schedule_stays_legal_and_as_short(
    name: str, ranks: int, microbatches: int, transfer: float
) -> None:
    schedule = small(name, ranks, microbatches)
    validate(fuse_adjacent(schedule))
    durations = seconds(3, 2, 1)
    fused = fuse_adjacent(schedule, durations, transfer=transfer)
    validate(fused)
    before = simulate(schedule, durations, transfer=transfer)
    after = simulate(fused, durations, transfer=transfer)
    assert after.makespan == pytest.approx(before.makespan)
