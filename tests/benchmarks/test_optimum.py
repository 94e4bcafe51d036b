"""Proven optima: what a step takes at least, by hand."""

from __future__ import annotations

import math

import pytest

from autosplit.mesh.costs import Link
from autosplit.pipeline import Costs, StageMemory, Transfer, search
from benchmarks.optimum import optimum


def alike(saved: float, deferred: float, transfer: Transfer | None = None) -> Costs:
    memory = [StageMemory(saved, deferred, 0.5)] * 2
    return Costs([(2.0, 2.0, 2.0)] * 2, memory, transfer or Transfer())


@pytest.mark.parametrize(
    ("costs", "limit", "seconds"),
    [
        (alike(1.0, 1.0), math.inf, 2 + 3 * 6),  # the second rank waits for one F
        (alike(1.0, 1.0), 1.0, 3 * (2 + 2 + 2 + 2 + 2)),  # one microbatch after another
        (alike(1.0, 1.0, Transfer(1.0)), math.inf, 3 + 3 * 6),
        (alike(1.0, 1.0, Transfer(0.0, 2.0, 1.0)), math.inf, 2.5 + 3 * 6),
    ],
)
def test_the_shortest_step_is_what_it_is_by_hand(
    costs: Costs, limit: float, seconds: float
) -> None:
    found = optimum(costs, 3, limit)
    assert found.step == pytest.approx(seconds)
    assert found.bound == pytest.approx(seconds)
    known = costs.timeline(search(costs, 3, cap=limit)).makespan
    assert known == pytest.approx(seconds)


def test_measures_of_memory_make_a_step_within_a_limit_shorter() -> None:
    costs = alike(1.0, 1.0, Transfer(0.0, 8.0, host=Link(0.0, 8.0)))
    plain = optimum(costs, 3, 1.0).step
    offloaded = optimum(costs, 3, 1.0, measures=("offload",)).step
    recomputed = optimum(costs, 3, 1.5, measures=("recompute",)).step
    assert offloaded < plain
    assert recomputed < plain


def test_without_room_for_one_microbatch_there_is_none() -> None:
    assert optimum(alike(1.0, 1.0), 3, 0.5) == (math.inf, math.inf)


def test_a_b_holds_less_than_an_i_that_leaves_more_and_sends_its_gradient_at_its_end() -> None:
    assert optimum(alike(1.0, 2.0), 1, 1.0).step == pytest.approx(2 + 2 + 4 + 4)
    assert optimum(alike(1.0, 2.0), 1, 2.0).step == pytest.approx(2 + 2 + 2 + 2 + 2)
