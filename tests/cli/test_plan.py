"""The search over stages, microbatches and schedules."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from autosplit.cli.plan import search_table
from autosplit.errors import PlanError
from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.simulation.collectives import ParameterRanks
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.planner.costs import ModelCosts
from autosplit.planner.cuts import CapError, Solution
from autosplit.planner.plan_search import Configuration, search_plans
from tests.planner.planned import even


def costs_of(size: int, count: int = 16) -> ModelCosts:
    """Blocks alike."""
    model = even(count, forward=float(size), parameters=8.0)
    blocks = [
        replace(block, saved=block.saved * size, deferred=block.deferred * size)
        for block in model.blocks
    ]
    return ModelCosts(tuple(blocks), tuple(size * item for item in model.crossing))


def named(configurations: list[Configuration], name: str) -> list[Configuration]:
    """The configurations of one schedule."""
    return [item for item in configurations if item.request.name == name]


def plan_of(one: Configuration) -> Solution:
    assert isinstance(one.outcome, Solution)
    return one.outcome


def test_the_best_comes_first_and_the_others_say_why_not() -> None:
    result = search_plans(partial(costs_of, count=8), 4, 32)
    able = [item.outcome for item in result if isinstance(item.outcome, Solution)]
    assert {item.request.name for item in result} == {*SCHEDULES}
    assert {item.request.microbatches for item in result} == {4, 8, 16}
    assert {item.size for item in result} == {8, 4, 2}
    assert plan_of(result[0]).step <= 1.01 * min(item.step for item in able)
    slow = min(plan_of(item).step for item in named(result, "naive"))
    assert slow > 2 * plan_of(result[0]).step
    (few, *_) = [item for item in named(result, "dualpipe-v") if item.request.microbatches == 4]
    assert "at least 2P microbatches" in str(few.outcome)
    table = search_table(result, 3)
    assert "1.000x" in table.splitlines()[2]
    assert " more (--rows shows them)" in table
    assert table.count(str(few.outcome)) == 1


def test_of_steps_that_are_about_as_long_the_one_that_holds_least_is_best() -> None:
    (one, *_) = search_plans(costs_of, 4, 32, microbatches=[8], schedules=["1f1b"])
    plan = plan_of(one)

    def like(longer: float, part: float) -> Configuration:
        changed = tuple(part * peak for peak in plan.peaks)
        return one._replace(outcome=replace(plan, step=math.exp(longer), peaks=changed))

    full, light, late = like(1.0, 1.0), like(1.004, 0.5), like(1.02, 0.1)
    assert sorted([full, late, light], key=lambda item: item.key) == [light, full, late]


def test_gradients_of_replicas_take_time() -> None:
    space: dict[str, Any] = {"microbatches": [8], "schedules": ["1f1b"]}
    alone, replicated = (
        plan_of(search_plans(costs_of, 4, 32, **space, copies=copies)[0])
        for copies in (None, ParameterRanks(Link(0.0, 8.0), replicas=2))
    )
    # Each stage has four blocks.
    assert replicated.step == pytest.approx(alone.step + 4 * 8.0 / 8.0)


def test_a_cap_makes_others_win() -> None:
    space: dict[str, Any] = {"microbatches": [8], "schedules": ["1f1b", "gpipe"]}
    free = named(search_plans(costs_of, 4, 32, **space), "gpipe")
    most = max(max(plan_of(item).peaks) for item in free)
    capped = search_plans(costs_of, 4, 32, **space, cap=0.75 * most)
    assert max(plan_of(capped[0]).peaks) <= 0.75 * most
    assert all("fit under a cap of" in str(item.outcome) for item in named(capped, "gpipe"))
    with pytest.raises(CapError, match="the least cap that works is") as caught:
        search_plans(costs_of, 4, 32, **space, cap=10.0)
    fits = search_plans(costs_of, 4, 32, **space, cap=caught.value.least)
    assert max(plan_of(fits[0]).peaks) <= caught.value.least


def test_fixed_settings_are_not_searched() -> None:
    space: dict[str, Any] = {"microbatches": [4], "schedules": ["interleaved"]}
    result = search_plans(costs_of, 4, 8, stages=8, **space)
    for item in result:
        request = item.request
        assert (item.stages, request.ranks, request.microbatches) == (8, 4, 4)
        assert request.name == "interleaved"
    assert {plan.stages for plan in search_plans(costs_of, 4, 8, **space)} == {8, 12, 16}
    odd = search_plans(
        costs_of, 4, 8, stages=10, microbatches=[4], schedules=["1f1b", "interleaved"]
    )
    (lost, *_) = named(odd, "interleaved")
    assert "expected a multiple of 4 stages for 4 ranks, got 10" in str(lost.outcome)
    slow = search_plans(costs_of, 4, 8, stages=8, **space, links=Transfer(5.0))
    assert slow[0].key > result[0].key
    light = search_plans(costs_of, 4, 8, stages=8, **space, optimizer_state=0.0)
    assert light[0].key[1] < result[0].key[1]


@pytest.mark.parametrize(
    ("space", "batch", "error", "message"),
    [
        (
            {"microbatches": [5]},
            32,
            PlanError,
            "a batch of 32 cannot be cut into 5 equal microbatches; possible counts: 1, 2, 4, 8",
        ),
        ({"stages": 20}, 32, PlanError, "can run: cannot cut 16 blocks into 20 stages"),
        (
            {"schedules": ["dualpipe-v"], "microbatches": [2]},
            32,
            PlanError,
            "no configuration can run: 'dualpipe-v' needs at least 2P microbatches",
        ),
    ],
    ids=str,
)
def test_bad_input(space: dict[str, Any], batch: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        search_plans(costs_of, 4, batch, **space)


def test_one_reason_for_all_is_said_once() -> None:
    with pytest.raises(PlanError, match="cannot cut 16 blocks into 20 stages") as caught:
        search_plans(costs_of, 20, 20, schedules=["gpipe", "1f1b"])
    assert str(caught.value).count("cannot cut 16 blocks into 20 stages") == 1
