"""The mode in which a model was not captured is captured when its first stage is built."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autosplit.planner import WholeModel, captured_model, cut
from tests.planner.whole_models import Case, run_modules


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


def test_evaluation_may_begin_in_inference_mode_and_under_autocast() -> None:
    case = noisy()
    split, modules = halves_of(case)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for module in (case.model, *modules):
            module.eval()
    assert torch.equal(run_modules(split, modules, case.tensors()), case.model(*case.args))


def test_the_model_is_evaluated_as_it_was_when_the_stage_was_built() -> None:
    case = noisy()
    expected = copy.deepcopy(case.model).eval()
    split, modules = halves_of(case)
    case.model[2] = nn.Identity()
    for module in modules:
        module.eval()
    assert torch.equal(run_modules(split, modules, case.tensors()), expected(*case.args))
