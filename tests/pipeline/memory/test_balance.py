"""Activation balancing, on simulated steps."""

from __future__ import annotations

import re

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.memory.balance import balance
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.moves import journeys_of
from autosplit.pipeline.simulation.activation_memory import peak_memory
from autosplit.pipeline.validation.validate import validate

from .costs import costs_of


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_papers_bound_in_whole_microbatches(ranks: int) -> None:
    """ceil((N+2)/2) by BPipe, on the rank that held N."""
    plain = build("1f1b", ranks, 2 * ranks, split_backward=False)
    balanced = balance(plain)
    validate(balanced)
    costs = costs_of(ranks, took=1e-9, tensors=1)
    peaks = costs.peaks(balanced, costs.timeline(balanced))
    assert max(peaks) == pytest.approx(1e6 * ((ranks + 3) // 2))
    assert balanced.partners == tuple(reversed(range(ranks)))
    assert not balanced.moved


@pytest.mark.parametrize(("ranks", "share"), [(4, 0.65), (8, 0.6)])
def test_ranks_hold_alike_at_no_cost(ranks: int, share: float) -> None:
    """The figures of balance, N = 4 and 8, M = 2N: how even, how low, how fast."""
    plain = build("1f1b", ranks, 2 * ranks, split_backward=False)
    costs = costs_of(ranks)
    balanced = balance(plain, share * ranks * 1e6, costs=costs)
    validate(balanced)
    before, after = costs.timeline(plain), costs.timeline(balanced)
    peaks = costs.peaks(balanced, after)
    assert max(peaks) <= 1.0001 * share * max(costs.peaks(plain, before))
    assert max(peaks) <= 1.15 * min(peaks)
    assert after.step_time <= 1.03 * before.step_time


def test_only_as_much_of_each_microbatch_travels_as_is_asked_for() -> None:
    plain = build("1f1b", 4, 8, split_backward=False)
    a_little, much = (balance(plain, share * 4e6, costs=costs_of(4)) for share in (0.9, 0.65))
    assert 0 < a_little.moved[0] < much.moved[0] < 1e6


def test_what_is_evicted_is_the_latest() -> None:
    """The first to go is what the rank made last and uses last."""
    balanced = balance(build("1f1b", 4, 8, split_backward=False))
    row = balanced.ranks[0]
    for journey in journeys_of(balanced):
        if journey.rank == 0:
            flying = {
                a.microbatch for a in row[: journey.leaves] if a.kind is ActionKind.FORWARD
            } - {a.microbatch for a in row[: journey.leaves] if a.kind is ActionKind.BACKWARD}
            assert journey.microbatch == max(flying)


def test_deferred_tensors_travel_too() -> None:
    """With 2BP's placement most of what is held waits for W."""
    costs = costs_of(4, deferred=1.2)
    plain = build("1f1b", 4, 8, weights="2bp")
    peaks = costs.peaks(plain, costs.timeline(plain))
    balanced = balance(plain, [0.85 * peaks[0], 0.85 * peaks[1], 1e8, 1e8], costs=costs)
    validate(balanced)
    assert any(journey.deferred for journey in journeys_of(balanced))


def test_a_bound_that_holds_anyway_changes_nothing() -> None:
    plain = build("1f1b", 4, 8, split_backward=False)
    assert balance(plain, 4e6, costs=costs_of(4)) == plain


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


def test_by_order_it_is_a_bound() -> None:
    costs = costs_of(4)
    balanced = balance(build("1f1b", 4, 8, split_backward=False), 2.7e6, costs=costs)
    bounds = peak_memory(balanced, costs.memory)
    peaks = costs.peaks(balanced, costs.timeline(balanced))
    assert all(peak <= bound * 1.0001 for peak, bound in zip(peaks, bounds, strict=True))
