"""The search over stages, microbatches and schedules."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from autosplit.errors import PlanError
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.planner.costs import ModelCosts
from autosplit.planner.cuts import CapError, Limits
from autosplit.planner.plan_search import Configuration, ranked, search_plans, search_table
from autosplit.text.figures import size_text
from tests.planner.planned import even


def costs_of(size: int) -> ModelCosts:
    """Blocks alike."""
    model = even(16, forward=float(size), parameters=8.0)
    blocks = [
        replace(block, saved=block.saved * size, deferred=block.deferred * size)
        for block in model.blocks
    ]
    return ModelCosts(tuple(blocks), tuple(size * each for each in model.crossing))


def named(found: list[Configuration], name: str, **values: Any) -> list[Configuration]:
    """Those of a schedule whose requests have these values."""
    return [
        each
        for each in found
        if each.request.name == name
        and all(getattr(each.request, key) == value for key, value in values.items())
    ]


def test_the_best_comes_first_and_the_others_say_why_not() -> None:
    found = search_plans(costs_of, 4, 32)
    best = found[0]
    assert best.solution is not None
    assert best.lost == ""
    assert {each.request.name for each in found} == {*SCHEDULES}
    assert {each.request.microbatches for each in found} == {4, 8, 16}
    assert {each.size for each in found} == {8, 4, 2}
    steps = [each.solution.step for each in found[1:] if each.solution]
    assert steps == sorted(steps)
    assert best.solution.step <= 1.01 * steps[0]
    slow = named(found, "naive", microbatches=8, split_backward=False)[0]
    assert slow.solution is not None
    assert slow.lost == f"slower by {slow.solution.step / best.solution.step - 1:.1%}"
    (few, *_) = named(found, "dualpipe-v", microbatches=4)
    assert "at least 2P microbatches" in few.lost
    table = search_table(found, 3)
    assert [line.split()[-1] for line in table.splitlines()[2:3]] == ["best"]
    assert " more, none faster (--rows shows them)" in table
    assert table.count(few.lost) == 1


def test_of_steps_that_are_about_as_long_the_one_that_holds_least_is_best() -> None:
    (one, *_) = search_plans(costs_of, 4, 32, microbatches=[8], schedules=["1f1b"])
    assert one.solution is not None
    step, peaks = one.solution.step, one.solution.peaks

    def like(longer: float, part: float) -> Configuration:
        changed = tuple(part * peak for peak in peaks)
        return replace(one, solution=replace(one.solution, step=longer * step, peaks=changed))

    full, light, late = like(1.0, 1.0), like(1.008, 0.5), like(1.02, 0.1)
    first, *others = ranked([full, late, light])
    assert first is light
    assert [each.lost for each in others] == [
        f"faster by 0.8%, but holds {size_text(math.ceil(max(peaks) / 2))} more",
        "slower by 1.2%",
    ]


def test_a_cap_makes_others_win() -> None:
    space: dict[str, Any] = {"microbatches": [8], "schedules": ["1f1b", "gpipe"]}
    free = named(search_plans(costs_of, 4, 32, **space), "gpipe")
    most = max(max(each.solution.peaks) for each in free if each.solution)
    capped = search_plans(costs_of, 4, 32, **space, limits=Limits(cap=0.75 * most))
    assert capped[0].solution is not None
    assert max(capped[0].solution.peaks) <= 0.75 * most
    over = named(capped, "gpipe", split_backward=True)[0]
    assert over.solution is None
    assert over.lost.startswith("over the cap by ")
    with pytest.raises(CapError, match="nothing fits: the least cap is") as caught:
        search_plans(costs_of, 4, 32, **space, limits=Limits(cap=10.0))
    least = caught.value.least
    fits = search_plans(costs_of, 4, 32, **space, limits=Limits(cap=least))
    assert any(each.solution for each in fits)


def test_what_is_settled_stays() -> None:
    space: dict[str, Any] = {"microbatches": [16], "schedules": ["interleaved"]}
    found = search_plans(costs_of, 4, 32, stages=8, **space)
    for each in found:
        request = each.request
        assert (each.stages, request.ranks, request.microbatches) == (8, 4, 16)
        assert request.name == "interleaved"
    assert {each.request.split_backward for each in found} == {True, False}
    assert {each.stages for each in search_plans(costs_of, 4, 32, **space)} == {8, 12, 16}
    odd = search_plans(
        costs_of, 4, 32, stages=10, microbatches=[16], schedules=["1f1b", "interleaved"]
    )
    (lost, *_) = named(odd, "interleaved")
    assert "expected a multiple of 4 stages for 4 ranks, got 10" in lost.lost
    slow = search_plans(costs_of, 4, 32, stages=8, **space, limits=Limits(links=Transfer(5.0)))
    assert slow[0].key > found[0].key
    light = search_plans(costs_of, 4, 32, stages=8, **space, limits=Limits(optimizer_state=0.0))
    assert light[0].key[1] < found[0].key[1]


@pytest.mark.parametrize(
    ("space", "batch", "error", "message"),
    [
        (
            {"microbatches": [5]},
            32,
            PlanError,
            "a batch of 32 cannot be cut into 5 equal microbatches; it can into 1, 2, 4, 8, 16, 32",
        ),
        ({"stages": 20}, 32, PlanError, "20 stages are more than the model has blocks, 16"),
        ({"stages": 0}, 32, PlanError, "stages must be from 1 to 1,000,000,000, got 0"),
        ({}, 0, PlanError, "batch must be from 1 to 1,000,000,000, got 0"),
        (
            {"schedules": ["dualpipe-v"], "microbatches": [2]},
            32,
            PlanError,
            "nothing can run: 'dualpipe-v' needs at least 2P microbatches",
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
