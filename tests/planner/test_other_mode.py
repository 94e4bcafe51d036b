"""The mode in which a model was not captured is captured at the first call in that mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import PipelineTrainer, StageOptions
from autosplit.errors import PlanError
from autosplit.planner import WholeModel, captured_model, cut
from tests.planner.whole_models import Case, run_modules
from tests.zoo import Made


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each capture from now on, whether it is for training."""
    results: list[bool] = []
    capture = captured_model.capture_forward

    def counted(model: nn.Module, *inputs: Any) -> Any:
        results.append(model.training)
        return capture(model, *inputs)

    monkeypatch.setattr(captured_model, "capture_forward", counted)
    return results


def noisy() -> Case:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.BatchNorm1d(4))
    return Case(model, (torch.randn(6, 4),))


def halves_of(case: Case) -> tuple[Any, list[nn.Module]]:
    split = cut(WholeModel.capture(case.model, case.args, case.kwargs), [1])
    return split, [split.build(index) for index in range(2)]


def set_mode(module: nn.Module) -> nn.Module:
    module.training = False
    return module


@pytest.mark.parametrize(
    "evaluated",
    [nn.Module.eval, set_mode, lambda module: copy.deepcopy(module).eval()],
    ids=["call", "attribute", "copy"],
)
def test_evaluation_captures_once_for_all_stages(captures: list[bool], evaluated: Any) -> None:
    case = noisy()
    split, modules = halves_of(case)
    for _ in range(2):
        case.model.eval()
        result = run_modules(split, [*map(evaluated, modules)], case.tensors())
        assert torch.equal(result, case.model(*case.args))
        for module in modules:
            module.train()
    assert captures == [True, False]


def test_training_goes_on_with_its_graphs_after_an_evaluation() -> None:
    case = noisy()
    inputs, targets = case.args[0], torch.zeros(6, 4)
    with PipelineTrainer(
        case.model,
        nn.functional.mse_loss,
        torch.optim.SGD,
        stages=2,
        ranks=1,
        microbatches=2,
        example=inputs[:3],
        stage_options=StageOptions(planning={"costs": "estimate"}),
    ) as trainer:
        for _ in range(2):
            trainer.step(inputs, target=targets)
            trainer.evaluate(inputs, target=targets)
        assert [len(stage.captured) for stage in trainer.stages.values()] == [1, 1]
        assert "0 before 2, 1 from 2" in trainer.report()


def test_evaluation_may_begin_in_inference_mode_and_under_autocast() -> None:
    case = noisy()
    split, modules = halves_of(case)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for module in (case.model, *modules):
            module.eval()
    assert torch.equal(run_modules(split, modules, case.tensors()), case.model(*case.args))


def test_stages_that_only_train_are_not_captured_for_evaluation(captures: list[bool]) -> None:
    case = noisy()
    split, modules = halves_of(case)
    run_modules(split, modules, case.tensors())
    assert captures == [True]


def test_evaluation_begins_where_the_stage_has_moved() -> None:
    case = noisy()
    _, modules = halves_of(case)
    modules[0].to("meta").eval()  # in place of an accelerator
    assert modules[0].check_inputs(case.args).device == torch.device("meta")


def test_a_stage_is_split_in_the_mode_that_was_not_captured() -> None:
    case = noisy()
    _, modules = halves_of(case)
    (x,) = case.args
    assert torch.equal(autosplit.split(modules[0].eval())(x)[0], case.model[0](x))


def test_messages_of_other_shapes_in_evaluation_are_refused() -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        x = module.first(x)
        return module.second(x if module.training else x[:2])

    model = Made(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    whole, firsts = WholeModel.capture(model, (torch.randn(6, 4),)).divided(["second"])
    stage = cut(whole, firsts).build(1).eval()
    with pytest.raises(PlanError, match="send each other different tensors"):
        stage(torch.randn(6, 4))


class Averaging(nn.Linear):
    """Begins with an operation that only training has."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x - self.mean)


def test_a_stage_may_begin_at_a_module_that_begins_with_an_operation_of_training() -> None:
    case = Case(nn.Sequential(nn.Linear(4, 4), Averaging()), (torch.randn(6, 4),))
    unsplit = copy.deepcopy(case.model)
    whole, firsts = WholeModel.capture(case.model, case.args).divided(["1"])
    split = cut(whole, firsts)
    modules = [split.build(index) for index in range(2)]
    for training in (True, False):
        result = run_modules(split, [m.train(training) for m in modules], case.tensors())
        assert torch.equal(result, unsplit.train(training)(*case.args))
