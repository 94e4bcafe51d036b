"""What holds for every pass: legal stays legal, bounds are kept, memory comes back to nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.memory import balance, measures
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.simulation.activation_memory import memory_over_time, peak_memory
from autosplit.pipeline.validation.validate import validate

from .costs import FORMS, costs_of, schedule_of

NEAREST = {
    "balance": balance.nearest,
    "offload": measures.offloaded,
    "recompute": measures.recomputed,
}


@settings(deadline=None, max_examples=15)
@given(
    st.integers(0, len(FORMS) - 1),
    st.sampled_from([2, 3, 4]),
    st.integers(2, 6),
    st.sampled_from([0.3, 0.6, 0.9]),
    st.permutations(sorted(NEAREST)),
    st.sampled_from([0.05, 0.5, 3.0]),
    st.sampled_from([1, 8]),
)
def test_any_schedule_stays_legal_after_any_passes(
    form: int,
    ranks: int,
    microbatches: int,
    share: float,
    order: list[str],
    took: float,
    tensors: int,
) -> None:
    schedule = schedule_of(form, ranks, microbatches)
    costs = costs_of(schedule.stages, took=took, tensors=tensors)
    for name in order:
        if name == "balance" and schedule.partners is not None:
            continue
        peaks = costs.peaks(schedule, costs.timeline(schedule))
        bounds = [share * max(peaks)] * ranks
        schedule = NEAREST[name](schedule, costs, bounds)
        validate(schedule)
        timeline = costs.timeline(schedule)
        by_order = peak_memory(schedule, costs.memory)
        for rank in range(ranks):
            curve = memory_over_time(timeline, costs.memory, rank, schedule.moved)
            assert min(size for _, size in curve) >= -1.0  # of a million
            assert curve[-1][1] == pytest.approx(0.0, abs=1.0)
            assert max(size for _, size in curve) <= by_order[rank] + 1.0


def test_half_is_offloaded_for_nothing_where_bandwidth_allows() -> None:
    """And next to nothing where it does not."""
    plain = build("gpipe", 4, 8)
    fast, slow = costs_of(4, took=0.2), costs_of(4, took=40.0)
    before = fast.timeline(plain)
    free = measures.offload(plain, fast)
    after = fast.timeline(free)
    assert after.step_time <= 1.003 * before.step_time
    assert max(fast.peaks(free, after)) <= 0.5 * max(fast.peaks(plain, before))
    stuck = measures.offload(plain, slow)
    assert max(slow.peaks(stuck, slow.timeline(stuck))) > 0.9 * max(slow.peaks(plain, before))


def test_half_of_1f1b_is_offloaded_though_it_holds_two_microbatches() -> None:
    """A rank that holds two has to wait until one has left before it makes another."""
    plain, costs = build("1f1b", 2, 4), costs_of(2, took=0.05)
    before = costs.timeline(plain)
    most = max(peak_memory(plain, costs.memory))
    found = measures.offload(plain, costs, 0.55 * most)
    validate(found)
    assert max(peak_memory(found, costs.memory)) <= 0.55 * most
    assert costs.timeline(found).step_time <= 1.1 * before.step_time


def test_what_lives_longest_is_offloaded_first() -> None:
    plain, costs = build("gpipe", 2, 6, split_backward=False), costs_of(2)
    found = measures.offload(plain, costs, 5.1e6)
    timeline = costs.timeline(plain)
    times = {(span.rank, str(span.action)): span for span in timeline.spans}
    lives = {m: times[0, f"0B{m}"].start - times[0, f"0F{m}"].end for m in range(6)}
    away = {a.microbatch for a in found.ranks[0] if a.kind is ActionKind.OFFLOAD}
    assert len(away) == 1
    # What is made right before the one too much has no time to leave.
    assert lives[min(away)] == max(lives[m] for m in range(4))


def test_recomputation_runs_while_its_rank_waits() -> None:
    """Before the backward that it is for, not behind the gradients for which that waits."""
    plain, costs = build("1f1b", 4, 4, split_backward=False), costs_of(4)
    found = measures.recompute(plain, costs, 3.2e6)
    row = [str(action) for action in found.ranks[0]]
    again = [action for action in found.ranks[0] if action.kind is ActionKind.RECOMPUTE]
    assert again
    for action in again:
        assert row.index(str(action)) < row.index(f"0B{action.microbatch}")
    added = costs.timeline(found).step_time - costs.timeline(plain).step_time
    assert added < len(again) * 1.0


@pytest.mark.parametrize("name", ["offload", "recompute"])
def test_a_limit_that_cannot_be_kept_says_what_can(name: str) -> None:
    plain, costs = build("1f1b", 4, 8, split_backward=False), costs_of(4)
    take = {"offload": measures.offload, "recompute": measures.recompute}[name]
    with pytest.raises(ScheduleError, match="more than its bound of 500000: raise it to"):
        take(plain, costs, 5e5)


def test_limits_are_as_many_as_ranks() -> None:
    with pytest.raises(ScheduleError, match="one for each of 2 ranks"):
        measures.offload(build("gpipe", 2, 2), costs_of(2), [1.0])
