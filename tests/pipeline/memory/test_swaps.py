"""Exchanges that both ranks of a pair wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.memory.balance import balance
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.simulation.activation_memory import StageMemory, moved_bytes, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.pipeline.validation.validate import validate
from autosplit.runtime.fitting import fitting

MEMORY = StageMemory(12.0, 12.0, tensors=12, pieces=(1.0,) * 12)


@pytest.mark.parametrize(("ranks", "share"), [(4, 0.63), (8, 0.62)])
def test_pairs_come_down_to_half_of_what_both_hold_whatever_transfers_take(
    ranks: int, share: float
) -> None:
    """By order, so that no transfer that is late makes it more; over fast links at no cost."""
    plain = build("1f1b", ranks, 2 * ranks, split_backward=False)
    costs = Costs([(1.0, 1.0, 1.0)] * ranks, [MEMORY] * ranks, Transfer(1e-3, 1200.0))
    bound = share * 12.0 * ranks
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
    with pytest.raises(ScheduleError, match="waits for what no RETURN sent away"):
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
