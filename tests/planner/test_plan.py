"""Plans: made, reported and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autosplit.errors import PipelineError, PlanError, ScheduleError
from autosplit.pipeline import PipelineTrainer, RunOptions, StageOptions
from autosplit.planner import Plan, WholeModel, cutting, partition
from tests.kept_ranks import Ranks
from tests.planner.planned_models import (
    MICROBATCH,
    Net,
    costs,
    estimated,
    loss,
    measured,
    net,
    sgd,
    tokens,
    trained,
)


@pytest.fixture(scope="module")
def whole() -> tuple[Net, WholeModel]:
    model = net()
    return model, WholeModel.capture(model, tokens())


@pytest.fixture
def captured(whole: tuple[Net, WholeModel], monkeypatch: pytest.MonkeyPatch) -> Net:
    """A model of which all plans share a capture."""
    monkeypatch.setattr(WholeModel, "capture", lambda *_, **__: whole[1])
    return whole[0]


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = net()
    return partition(model, tokens(), stages=2, microbatches=4, costs=costs(model))


def test_a_plan_says_what_it_holds(plan: Plan) -> None:
    assert plan.stages == len(plan.schedule.ranks) == 2
    assert (plan.schedule.microbatches, plan.batch) == (4, 4 * MICROBATCH)
    assert plan.cuts == ("layers.2",)
    assert repr(plan) == "Plan(Net cut at layers.2, 2 ranks, '1f1b', 4 microbatches, 8 samples)"
    assert len(plan.stage_times) == 2
    assert plan.stage_times[0][1] == 0.0
    assert min(plan.peak_memory) > 0
    assert [sorted(group) for group in plan.shared] == [[(0, "embed.weight"), (1, "head.weight")]]


def test_a_limit_of_memory_is_kept_by_cuts_or_left_to_the_trainer(captured: Net) -> None:
    """If no cuts keep the limit, the plan's trainer keeps it."""
    model = captured

    def planned(limit: int | str | None) -> Plan:
        return partition(
            model,
            tokens(),
            stages=2,
            microbatches=4,
            schedule="gpipe",
            costs=costs(model),
            memory_limit=limit,
        )

    plain = planned(None)
    assert plain.arguments["memory_limit"] is None
    most = max(plain.peak_memory)
    kept = planned(int(most) + 1)
    assert max(kept.peak_memory) <= int(most) + 1 == kept.arguments["memory_limit"]
    result = planned(f"{int(most / 2)} B")
    assert result.arguments["memory_limit"] == int(most / 2)
    assert (result.cuts, result.schedule) == (plain.cuts, plain.schedule)
    for bad in ("12 GiBs", "lots", 0, 1.5, True):
        with pytest.raises(PlanError, match=r"expected memory_limit such as 80GiB.*, got "):
            planned(bad)  # type: ignore[arg-type]


def test_a_plan_within_a_limit_trains(tmp_path: Path) -> None:
    """In one process, which holds both stages."""
    model = net()
    options: dict[str, Any] = {"stages": 1, "ranks": 1, "microbatches": 4, "schedule": "gpipe"}
    plain = partition(model, tokens(), costs=costs(model), **options)
    most = max(plain.peak_memory)
    result = partition(model, tokens(), costs=costs(model), memory_limit=int(0.8 * most), **options)
    with result.trainer(
        loss,
        sgd,
        memory_limit="1GiB",
        run_options=RunOptions(store=tmp_path),
    ) as trainer:
        losses = trainer.step((tokens(8), tokens(8)))
    assert losses.isfinite().all()


def test_a_plan_for_other_processes_says_for_how_many(plan: Plan) -> None:
    with pytest.raises(PlanError) as caught:
        plan.trainer(loss, sgd)
    assert str(caught.value).startswith("the plan is for 2 processes and there is one: run under ")
    assert "--nproc-per-node 2" in str(caught.value)


def test_stages_of_a_plan_that_are_given_as_they_are_stay_tied() -> None:
    one, other = (
        partition(model, tokens(), stages=2, ranks=1, microbatches=2, costs=costs(model))
        for model in (net(), net())
    )
    options: dict[str, Any] = {"stages": 2, "microbatches": 2, "ranks": 1}
    with pytest.raises(PipelineError, match=r"is tied to .*shared_parameters=plan.shared"):
        PipelineTrainer(one.build, loss, sgd, **options)
    tied = StageOptions(shared_parameters=one.shared)  # as it says
    batch = tokens(4)
    with (
        PipelineTrainer(one.build, loss, sgd, stage_options=tied, **options) as engine,
        other.trainer(loss, sgd) as whole,
    ):
        for _ in range(2):
            assert torch.equal(engine.step((batch, batch)), whole.step((batch, batch)))


def test_one_process_trains_as_without_a_plan(plan: Plan) -> None:
    model, local = net(), net()
    one = partition(local, tokens(), stages=2, ranks=1, microbatches=2, costs=costs(local))
    optimizer = sgd(list(model.parameters()))
    with one.trainer(loss, sgd) as engine:
        for step in range(2):
            batch = tokens(4, step)
            result = engine.step((batch, batch))
            expected = torch.stack([loss(model(part), part) for part in batch.chunk(2)])
            expected.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(result, expected.detach())


def test_two_processes_train_a_plan_from_its_arguments(on_ranks: Ranks, plan: Plan) -> None:
    """Losses are those of the whole model in one process; evaluation is captured when it begins."""
    arguments = json.loads(json.dumps(plan.arguments))
    (losses, names, captures), (remaining, more, others) = on_ranks(
        trained, 2, (arguments, 3), timeout=100.0
    )
    assert captures == others == [1, 1, 2]
    model = net()
    optimizer = sgd(list(model.parameters()))
    for step in range(3):
        batch = tokens(8, step)
        expected = torch.stack([loss(model(part), part) for part in batch.chunk(4)])
        expected.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(losses[step], expected.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(losses[step], remaining[step])
    with torch.no_grad():
        evaluated = torch.stack([loss(model(part), part) for part in batch.chunk(4)])
    torch.testing.assert_close(losses[3], evaluated, rtol=1e-5, atol=1e-6)
    assert torch.equal(losses[3], remaining[3])
    assert "layers.0.up.weight" in names
    assert "layers.3.up.weight" in more
    assert {*names, *more} == {name for name, _ in model.named_parameters(remove_duplicate=False)}


def test_ranks_measure_together(on_ranks: Ranks) -> None:
    first, second = on_ranks(measured, 2, timeout=100.0)
    assert first == second
    assert len(first[0]) == 1
    assert 0.0 < first[1] < 1.0
    assert first[2] == 0  # the model has no gradients of it


def test_the_first_rank_estimates_for_all(on_ranks: Ranks) -> None:
    (cuts, step, *first), (*of_the_second_rank, count, error) = on_ranks(
        estimated, 2, timeout=100.0
    )
    assert of_the_second_rank == [cuts, step]
    assert first == [2, "no estimate"]
    assert (count, error) == (0, "no estimate")


def test_cut_at(plan: Plan) -> None:
    model = net()
    by_hand = partition(model, tokens(), cut_at=["layers.1"], costs=costs(model))
    assert by_hand.cuts == ("layers.1",)
    assert by_hand.predicted_step > 0.0
    assert by_hand.schedule.microbatches == 4
    inside = partition(model, tokens(), cut_at=["layers.1.down"], costs="estimate")
    assert len(inside.cuts) == 1


def test_arguments_give_the_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its measured times, and all options of its trainer; nothing is measured again."""
    options: dict[str, Any] = {"weights": "2bp", "autocast": torch.bfloat16, "memory": "lean"}
    first = partition(net(), tokens(), stages=2, ranks=1, microbatches=2, seconds=0.1, **options)
    arguments = json.loads(json.dumps(first.arguments))
    monkeypatch.setattr(cutting, "profile", pytest.fail)
    again = partition(net(), tokens(), **arguments)
    assert again.arguments == first.arguments
    assert (again.schedule, again.stage_times) == (first.schedule, first.stage_times)
    assert again.schedule != partition(net(), tokens(), **arguments | {"weights": None}).schedule
    batch = tokens(again.batch)
    with again.trainer(loss, sgd) as engine:
        result = engine.step((batch, batch))
    plain = partition(net(), tokens(), **arguments | {"autocast": None})
    for autocast, equal in ((torch.bfloat16, True), (None, False)):
        built = StageOptions(autocast=autocast)
        with plain.trainer(loss, sgd, stage_options=built) as engine:
            assert torch.equal(engine.step((batch, batch)), result) == equal
    message = "costs are 'profile', 'estimate', a ModelCosts, or what a plan's arguments have"
    with pytest.raises(PlanError, match=message):
        partition(net(), tokens(), **arguments | {"costs": {"blocks": [[1.0]]}})
    with pytest.raises(PlanError, match="autocast must be a dtype, such as 'bfloat16', or"):
        partition(net(), tokens(), **arguments | {"autocast": "bf16"})


def test_options_of_partition_have_effects(captured: Net) -> None:
    model = captured
    expected = costs(model)
    free = partition(model, tokens(), stages=2, microbatches=4, costs=expected)
    other = partition(model, tokens(), stages=2, microbatches=2, schedule="gpipe", costs=expected)
    assert (other.schedule.name, other.schedule.microbatches) == ("gpipe", 2)
    folded = partition(model, tokens(), stages=4, ranks=2, schedule="zb-v", costs=expected)
    assert len(folded.schedule.ranks) == 2
    lean = partition(model, tokens(), stages=2, memory="lean", costs=expected)
    assert lean.arguments["memory"] == "lean"

    def peak(**more: Any) -> float:
        options = {"stages": 2, "microbatches": 2, "schedule": "gpipe", "ranks": 1, **more}
        return max(partition(model, tokens(), costs="estimate", **options).peak_memory)

    usual = peak()
    assert peak(microbatches=4) > usual > peak(memory=0)
    assert peak(autocast=torch.bfloat16) != usual
    assert max(free.peak_memory) < max(
        partition(
            model, tokens(), stages=2, microbatches=4, schedule="gpipe", costs=expected
        ).peak_memory
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {},
            PlanError,
            r"pass the number of stages, stages=N, or the modules where they begin, cut",
        ),
        ({"stages": 9}, PlanError, "Net has blocks for 1 to 6 stages, got stages=9"),
        ({"stages": 3, "cut_at": ["layers.1"]}, PlanError, "which gives 2 stages, but stages=3"),
        ({"cut_at": ["layers.9"]}, PlanError, "cut_at='layers.9' is not a module that the forward"),
        ({"stages": 2, "costs": "guess"}, PlanError, "unknown costs 'guess'; known: profile"),
        ({"stages": 2, "costs": costs(net(2))}, PlanError, "costs has 4 blocks, but the model has"),
        ({"stages": 2, "schedule": "zigzag"}, ScheduleError, "unknown schedule 'zigzag'"),
        (
            {"stages": 2, "memory_limit": "1GiB", "split_backward": False},
            PlanError,
            "memory_limit needs separate I and W",
        ),
    ],
    ids=str,
)
def test_bad_input(
    options: dict[str, object], error: type[Exception], message: str, captured: Net
) -> None:
    inputs = {"costs": costs(captured), **options}
    with pytest.raises(error, match=message):
        partition(captured, tokens(), **inputs)  # type: ignore[arg-type]


def test_a_dictionary_is_keyword_inputs(plan: Plan) -> None:
    model = net()
    named = partition(model, {"tokens": tokens()}, stages=2, microbatches=4, costs=costs(model))
    assert named.cuts == plan.cuts
    assert named.wiring.names == ("tokens",)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(5, None), ("tokens", None), ({"tokens": tokens()}, {"more": 1}), ({1: 2}, None), ((), [1])],
    ids=["number", "text", "two dictionaries", "numbers for names", "list"],
)
def test_inputs_that_are_none(args: object, kwargs: Any) -> None:
    with pytest.raises(PlanError, match="inputs of one microbatch are a tensor, a tuple of"):
        partition(net(), args, kwargs, stages=2)


def test_a_list_is_no_model() -> None:
    with pytest.raises(PlanError, match=r"one nn\.Module to cut, got a list: give PipelineTrainer"):
        partition([net()], tokens(), stages=2)  # type: ignore[arg-type]
