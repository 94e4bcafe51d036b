"""The passes that keep ranks below a bound of memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.memory import measures
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer
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


# --- what holds for every pass: legal stays legal, bounds are kept, memory comes back to nothing


NEAREST = {
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
