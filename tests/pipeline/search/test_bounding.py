"""The passes that keep ranks below a bound of memory."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.moves import find_moves
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.search.remedies import REMEDIES, balance, offload, recompute
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.pipeline.validation.validate import validate

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


def costs_of(stages: int, *, took: float = 0.25, deferred: float = 0.8) -> Costs:
    """Like stages; what one holds takes so many seconds to a partner, and twice that to a host."""
    memory = StageMemory(1e6, deferred * 1e6, 1e5)
    links = Transfer(0.01, 1e6 / took, host=Link(0.01, 0.5e6 / took))
    return Costs([(1.0, 1.0, 1.0)] * stages, [memory] * stages, links)


# --- activation balancing, on simulated steps -----------------------------------------------------


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_papers_bound_in_whole_microbatches(ranks: int) -> None:
    """ceil((N+2)/2) by BPipe, on the rank that held N."""
    plain = build("1f1b", ranks, 2 * ranks, split_backward=False)
    balanced = balance(plain)
    validate(balanced)
    costs = costs_of(ranks, took=1e-9)
    peaks = peak_memory(balanced, costs.memory)
    assert max(peaks) == pytest.approx(1e6 * ((ranks + 3) // 2))


def test_ranks_hold_alike_at_no_cost() -> None:
    """The figures of balance, N = 8, M = 2N: how even, how low, how fast."""
    plain = build("1f1b", 8, 16, split_backward=False)
    costs = costs_of(8, took=0.1)
    balanced = balance(plain, costs=costs)
    validate(balanced)
    earlier, after = costs.timeline(plain), costs.timeline(balanced)
    peaks = peak_memory(balanced, costs.memory)
    assert max(peaks) <= 0.65 * max(peak_memory(plain, costs.memory))
    assert max(peaks) <= 1.3 * min(peaks)
    assert after.step_time <= 1.03 * earlier.step_time


def test_deferred_tensors_travel_too() -> None:
    """With 2BP's placement most of what is held waits for W."""
    costs = costs_of(4, deferred=1.2)
    plain = build("1f1b", 4, 8, weights="2bp")
    peaks = peak_memory(plain, costs.memory)
    balanced = balance(plain, [0.9 * peaks[0], 0.9 * peaks[1], 1e8, 1e8], costs=costs)
    validate(balanced)
    assert any(move.deferred for move in find_moves(balanced))


def test_a_schedule_that_evicts_is_not_balanced_again() -> None:
    balanced = balance(build("1f1b", 4, 8, split_backward=False))
    with pytest.raises(ScheduleError, match="evicts already"):
        balance(balanced)


# --- what holds for every pass: legal stays legal, bounds are kept, memory comes back to nothing


@settings(deadline=None, max_examples=15)
@given(
    st.integers(0, len(FORMS) - 1),
    st.sampled_from([2, 3, 4]),
    st.integers(2, 6),
    st.sampled_from([0.3, 0.6, 0.9]),
    st.permutations(sorted(REMEDIES)),
    st.sampled_from([0.05, 0.5, 3.0]),
)
def test_any_schedule_stays_legal_after_any_passes(
    form: int,
    ranks: int,
    microbatches: int,
    share: float,
    order: list[str],
    took: float,
) -> None:
    schedule = schedule_of(form, ranks, microbatches)
    costs = costs_of(schedule.stages, took=took)
    for name in order:
        if name == "balance" and find_moves(schedule):
            continue
        peaks = peak_memory(schedule, costs.memory)
        bounds = [share * max(peaks)] * ranks
        schedule = REMEDIES[name](schedule, costs, bounds)
        validate(schedule)
        costs.timeline(schedule)  # ranks do not wait for each other in a circle


def test_half_is_offloaded_for_nothing_where_bandwidth_allows() -> None:
    """And next to nothing where it does not."""
    plain = build("gpipe", 2, 6)
    fast, slow = costs_of(2, took=0.2), costs_of(2, took=40.0)
    earlier = fast.timeline(plain)
    free = offload(plain, fast)
    after = fast.timeline(free)
    assert after.step_time <= 1.003 * earlier.step_time
    assert max(peak_memory(free, fast.memory)) <= 0.5 * max(peak_memory(plain, fast.memory))
    stuck = offload(plain, slow)
    assert max(peak_memory(stuck, slow.memory)) > 0.9 * max(peak_memory(plain, slow.memory))


def test_recomputation_runs_while_its_rank_waits() -> None:
    """Before the backward that it is for, not behind the gradients for which that waits."""
    plain, costs = build("1f1b", 4, 4, split_backward=False), costs_of(4)
    result = recompute(plain, costs, 3.2e6)
    row = [str(action) for action in result.ranks[0]]
    again = [action for action in result.ranks[0] if action.kind is ActionKind.RECOMPUTE]
    assert again
    for action in again:
        assert row.index(str(action)) < row.index(f"0B{action.microbatch}")
    added = costs.timeline(result).step_time - costs.timeline(plain).step_time
    assert added < len(again) * 1.0


LIMITED = {"balance": balance, "offload": offload, "recompute": recompute}


@pytest.mark.parametrize("per_rank", [False, True])
@pytest.mark.parametrize("name", LIMITED)
def test_an_unkeepable_limit_names_one_that_can_be_kept(name: str, per_rank: bool) -> None:
    plain, costs = build("zb-h2", 4, 6), costs_of(4, deferred=0.87654321)
    option = "bound" if name == "balance" else "limit"
    limit = [1.0, 1.0, 1e9, 1e9] if per_rank else 1.0
    with pytest.raises(ScheduleError, match="above its limit of 1 ") as caught:
        LIMITED[name](plain, costs=costs, **{option: limit})
    (least,) = re.findall("raise the limit to (.*), take", str(caught.value))
    validate(LIMITED[name](plain, costs=costs, **{option: json.loads(least)}))


def test_limits_are_as_many_as_ranks() -> None:
    with pytest.raises(ScheduleError, match="a number for each of 2 ranks"):
        offload(build("gpipe", 2, 2), costs_of(2), [1.0])
