"""The search over stages, microbatches, schedules and memory settings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from autosplit.errors import PlanError, ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.planner.costs import Limits, ModelCosts
from autosplit.planner.cuts import CapError
from autosplit.planner.plan_search import Configuration, SearchSpace, ranked, search_plans
from autosplit.text.figures import size_text
from tests.planner.planned import even


def costs_of(size: int, memory: str) -> ModelCosts:
    """Blocks alike: ``fast`` keeps twice as much and takes 10% less, ``lean`` the other way."""
    keeps, takes = {"balanced": (1.0, 1.0), "fast": (2.0, 0.9), "lean": (0.5, 1.1)}[memory]
    model = even(16, forward=size * takes, parameters=8.0)
    blocks = [
        replace(block, saved=block.saved * keeps * size, deferred=block.deferred * keeps * size)
        for block in model.blocks
    ]
    return ModelCosts(tuple(blocks), tuple(size * each for each in model.crossing), 0.01)


def named(found: list[Configuration], **values: Any) -> list[Configuration]:
    return [
        each
        for each in found
        if all(getattr(each, name) == value for name, value in values.items())
    ]


def test_the_best_comes_first_and_the_others_say_why_not() -> None:
    found = search_plans(costs_of, 4, 32, space=SearchSpace(memory=["balanced", "fast"]))
    best = found[0]
    assert best.solution is not None
    assert best.lost == ""
    assert best.memory == "fast"
    assert {each.schedule for each in found} == {*SCHEDULES}
    assert {each.memory for each in found} == {"balanced", "fast"}
    assert {each.microbatches for each in found} == {4, 8, 16}
    assert {each.microbatch_size for each in found} == {8, 4, 2}
    steps = [each.solution.step for each in found[1:] if each.solution]
    assert steps == sorted(steps)
    assert best.solution.step <= 1.01 * steps[0]
    slow = named(found, schedule="naive", memory="fast", microbatches=8, fused=True)[0]
    assert slow.solution is not None
    assert slow.lost == f"slower by {slow.solution.step / best.solution.step - 1:.1%}"
    (few, *_) = named(found, schedule="dualpipe-v", microbatches=4)
    assert "at least 2P microbatches" in few.lost


def test_of_steps_that_are_about_as_long_the_one_that_holds_least_is_best() -> None:
    space = SearchSpace(microbatches=[8], schedules=["1f1b"], memory=["fast"])
    (one, *_) = search_plans(costs_of, 4, 32, space=space)
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
    space = SearchSpace(microbatches=[8], schedules=["1f1b", "gpipe"])
    free = search_plans(costs_of, 4, 32, space=space)
    assert free[0].solution is not None
    most = max(free[0].solution.peaks)
    capped = search_plans(costs_of, 4, 32, space=space, limits=Limits(cap=0.75 * most))
    assert capped[0].solution is not None
    assert max(capped[0].solution.peaks) <= 0.75 * most
    assert capped[0].memory != "fast"
    over = named(capped, schedule="gpipe", memory="fast", fused=False)[0]
    assert over.solution is None
    assert over.lost.startswith("over the cap by ")
    with pytest.raises(CapError, match="nothing fits: the least cap is") as caught:
        search_plans(costs_of, 4, 32, space=space, limits=Limits(cap=10.0))
    least = caught.value.least
    fits = search_plans(costs_of, 4, 32, space=space, limits=Limits(cap=least))
    assert [each.lost for each in fits if each.solution] == [""]
    with pytest.raises(CapError):
        search_plans(costs_of, 4, 32, space=space, limits=Limits(cap=0.999 * least))


def test_what_is_settled_stays() -> None:
    space = SearchSpace(stages=8, microbatches=[16], schedules=["interleaved"], memory=["lean"])
    found = search_plans(costs_of, 4, 32, space=space)
    for each in found:
        assert (each.stages, each.ranks, each.microbatches) == (8, 4, 16)
        assert (each.schedule, each.memory) == ("interleaved", "lean")
    assert {each.fused for each in found} == {True, False}
    open_stages = search_plans(costs_of, 4, 32, space=replace(space, stages=None))
    assert {each.stages for each in open_stages} == {8, 12, 16}
    odd = search_plans(
        costs_of, 4, 32, space=replace(space, schedules=["1f1b", "interleaved"], stages=10)
    )
    (lost, *_) = named(odd, schedule="interleaved")
    assert "expected a multiple of 4 stages for 4 ranks, got 10" in lost.lost
    slow = search_plans(costs_of, 4, 32, space=space, limits=Limits(links=Transfer(5.0)))
    assert slow[0].key > found[0].key
    light = search_plans(costs_of, 4, 32, space=space, limits=Limits(optimizer_state=0.0))
    assert light[0].key[1] < found[0].key[1]


@pytest.mark.parametrize(
    ("space", "batch", "error", "message"),
    [
        (
            SearchSpace(microbatches=[5]),
            32,
            PlanError,
            "a batch of 32 cannot be cut into 5 equal microbatches; it can into 1, 2, 4, 8, 16, 32",
        ),
        (SearchSpace(stages=20), 32, PlanError, "20 stages are more than the model has blocks, 16"),
        (SearchSpace(stages=0), 32, PlanError, "stages must be at least 1, got 0"),
        (SearchSpace(), 0, PlanError, "batch must be at least 1, got 0"),
        (
            SearchSpace(schedules=["zigzag"]),
            32,
            ScheduleError,
            "unknown schedule 'zigzag'; known: naive",
        ),
        (
            SearchSpace(memory=["huge"]),
            32,
            PlanError,
            "unknown memory setting 'huge'; known: balanced",
        ),
        (
            SearchSpace(schedules=["dualpipe-v"], microbatches=[2]),
            32,
            PlanError,
            "nothing can run: 'dualpipe-v' needs at least 2P microbatches",
        ),
    ],
    ids=str,
)
def test_bad_input(space: SearchSpace, batch: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        search_plans(costs_of, 4, batch, space=space)


def test_one_reason_for_all_is_said_once() -> None:
    space = SearchSpace(schedules=["gpipe", "1f1b"])
    with pytest.raises(PlanError, match="cannot cut 16 blocks into 20 stages") as caught:
        search_plans(costs_of, 20, 20, space=space)
    assert str(caught.value).count("cannot cut") == 1
