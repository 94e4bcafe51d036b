"""The passes that keep ranks below a bound of memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.memory import measures
from autosplit.pipeline.memory.measures import balance
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import journeys_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import (
    StageMemory,
    moved_bytes,
    peak_memory,
)
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.pipeline.validation.validate import validate
from autosplit.runtime.fitting import fitting

# --- costs with which the passes of memory have something to do -----------------------------------


FORMS = [
    ("1f1b", {"split_backward": False}),
    ("1f1b", {"weights": "2bp"}),
    ("gpipe", {}),
    ("zb-h1", {}),
    ("interleaved", {}),
    ("zb-v", {}),
]
"""Schedules by name and options."""


def schedule_of(form: int, ranks: int, microbatches: int) -> Schedule:
    """One of the ``FORMS``."""
    name, options = FORMS[form]
    return build(name, ranks * (SCHEDULES[name].chunks or 2), microbatches, ranks=ranks, **options)


def costs_of(stages: int, *, took: float = 0.25, deferred: float = 0.8, tensors: int = 16) -> Costs:
    """Like stages; what one holds takes so many seconds to a partner, and twice that to a host."""
    memory = StageMemory(1e6, deferred * 1e6, 1e5, tensors=tensors)
    links = Transfer(0.01, 1e6 / took, host=Link(0.01, 0.5e6 / took))
    return Costs([(1.0, 1.0, 1.0)] * stages, [memory] * stages, links)


# --- activation balancing, on simulated steps -----------------------------------------------------


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_papers_bound_in_whole_microbatches(ranks: int) -> None:
    """ceil((N+2)/2) by BPipe, on the rank that held N."""
    plain = build("1f1b", ranks, 2 * ranks, split_backward=False)
    balanced = balance(plain)
    validate(balanced)
    costs = costs_of(ranks, took=1e-9, tensors=1)
    peaks = peak_memory(balanced, costs.memory)
    assert max(peaks) == pytest.approx(1e6 * ((ranks + 3) // 2))
    assert balanced.partners == tuple(reversed(range(ranks)))
    assert not balanced.moved


def test_ranks_hold_alike_at_no_cost() -> None:
    """The figures of balance, N = 4, M = 2N: how even, how low, how fast."""
    plain = build("1f1b", 4, 8, split_backward=False)
    costs = costs_of(4, took=0.1)
    balanced = balance(plain, 0.65 * 4e6, costs=costs)
    validate(balanced)
    before, after = costs.timeline(plain), costs.timeline(balanced)
    peaks = peak_memory(balanced, costs.memory)
    assert max(peaks) <= 1.0001 * 0.65 * max(peak_memory(plain, costs.memory))
    assert max(peaks) <= 1.15 * min(peaks)
    assert after.step_time <= 1.03 * before.step_time


def test_deferred_tensors_travel_too() -> None:
    """With 2BP's placement most of what is held waits for W."""
    costs = costs_of(4, deferred=1.2)
    plain = build("1f1b", 4, 8, weights="2bp")
    peaks = peak_memory(plain, costs.memory)
    balanced = balance(plain, [0.85 * peaks[0], 0.85 * peaks[1], 1e8, 1e8], costs=costs)
    validate(balanced)
    assert any(journey.deferred for journey in journeys_of(balanced))


def test_a_bound_that_cannot_be_kept_says_what_can() -> None:
    """And following that advice works."""
    plain, costs = build("1f1b", 4, 8, split_backward=False), costs_of(4)
    with pytest.raises(ScheduleError, match=r"balancing leaves rank .* raise it to") as caught:
        balance(plain, 2e6, costs=costs)
    (least,) = re.findall(r"raise it to ([0-9.e+]+),", str(caught.value))
    validate(balance(plain, 1.02 * float(least), costs=costs))


def test_what_evicts_is_not_balanced_again() -> None:
    balanced = balance(build("1f1b", 4, 8, split_backward=False))
    with pytest.raises(ScheduleError, match="evicts already"):
        balance(balanced)


# --- what holds for every pass: legal stays legal, bounds are kept, memory comes back to nothing


NEAREST = {
    "balance": measures.balanced,
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
        peaks = peak_memory(schedule, costs.memory)
        bounds = [share * max(peaks)] * ranks
        schedule = NEAREST[name](schedule, costs, bounds)
        validate(schedule)
        costs.timeline(schedule)  # ranks do not wait for each other in a circle


def test_half_is_offloaded_for_nothing_where_bandwidth_allows() -> None:
    """And next to nothing where it does not."""
    plain = build("gpipe", 2, 6)
    fast, slow = costs_of(2, took=0.2), costs_of(2, took=40.0)
    before = fast.timeline(plain)
    free = measures.offload(plain, fast)
    after = fast.timeline(free)
    assert after.step_time <= 1.003 * before.step_time
    assert max(peak_memory(free, fast.memory)) <= 0.5 * max(peak_memory(plain, fast.memory))
    stuck = measures.offload(plain, slow)
    assert max(peak_memory(stuck, slow.memory)) > 0.9 * max(peak_memory(plain, slow.memory))


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


# --- exchanges that both ranks of a pair wait for -------------------------------------------------


MEMORY = StageMemory(12.0, 12.0, tensors=12, pieces=(1.0,) * 12)


def test_pairs_come_down_to_half_of_what_both_hold_whatever_transfers_take() -> None:
    """By order, so that no transfer that is late makes it more; over fast links at no cost."""
    plain = build("1f1b", 4, 8, split_backward=False)
    costs = Costs([(1.0, 1.0, 1.0)] * 4, [MEMORY] * 4, Transfer(1e-3, 1200.0))
    bound = 0.63 * 48.0
    balanced = balance(plain, bound, costs=costs)
    validate(balanced)
    assert max(peak_memory(balanced, costs.memory)) <= bound
    assert costs.timeline(balanced).step_time <= 1.02 * costs.timeline(plain).step_time


def test_a_rank_may_wait_until_what_it_gives_back_has_left() -> None:
    """It then holds less before it computes on; waiting for what it did not give is refused."""
    plain = build("1f1b", 4, 8, split_backward=False)
    costs = Costs([(1.0, 1.0, 1.0)] * 4, [MEMORY] * 4, Transfer(1e-3, 1200.0))
    balanced = balance(plain, 0.63 * 48.0, costs=costs)
    last = balanced.ranks[3]
    waits = [place for place, a in enumerate(last) if a.kind is ActionKind.AWAIT]
    assert waits
    # Without the waits the rank holds more by order.
    without = tuple(action for action in last if action.kind is not ActionKind.AWAIT)
    less = replace(balanced, ranks=(*balanced.ranks[:3], without))
    validate(less)
    assert peak_memory(less, costs.memory)[3] > peak_memory(balanced, costs.memory)[3]
    early = (Action(0, ActionKind.AWAIT, 7), *last)
    with pytest.raises(ScheduleError, match="0AWAIT7 finds what is not here"):
        validate(replace(balanced, ranks=(*balanced.ranks[:3], early)))


def test_a_small_tensor_does_not_keep_a_larger_one_from_travelling() -> None:
    sizes = [1.0, 8.0, 8.0, 8.0]
    assert fitting(sizes, 24.0) == [1, 2, 3]
    assert fitting(sizes, 25.0) == [0, 1, 2, 3]
    assert fitting(sizes, 9.0) == [0, 1]
    assert fitting(sizes, 0.5) == []
    memory = StageMemory(25.0, 9.0, tensors=4, pieces=tuple(sizes))
    assert moved_bytes({0: 17}, 0, memory, deferred=False) == 17.0
    assert moved_bytes({0: 20}, 0, memory, deferred=False) == 17.0
    assert moved_bytes({0: 24}, 0, memory, deferred=False) == 24.0
    assert moved_bytes({}, 0, memory, deferred=False) == 25.0
