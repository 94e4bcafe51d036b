"""The other mode of a model is captured when a stage enters it, from a copy without parameters."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.errors import PlanError
from autosplit.planner import WholeModel, captured_model, cut
from autosplit.planner.captured_model import bare_copy
from tests.planner.whole_models import (
    Case,
    llama,
    mamba,
    mixed,
    resnet,
    run_modules,
)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each capture from now on, whether it is for training."""
    found: list[bool] = []
    capture = captured_model.capture_forward

    def counted(model: nn.Module, *inputs: Any) -> Any:
        found.append(model.training)
        return capture(model, *inputs)

    monkeypatch.setattr(captured_model, "capture_forward", counted)
    return found


def noisy() -> Case:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.BatchNorm1d(4))
    return Case(model, (torch.randn(6, 4),))


def halves_of(case: Case) -> tuple[Any, list[nn.Module]]:
    split = cut(WholeModel.capture(case.model, case.args, case.kwargs), [1])
    return split, [split.build(index) for index in range(2)]


@pytest.mark.parametrize("make", [llama, mamba, resnet, mixed], ids=lambda f: f.__name__)
def test_models_of_transformers_can_be_copied(make: Callable[[], Case]) -> None:
    model = make().model
    copied = bare_copy(model)
    assert [name for name, _ in copied.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]


def test_evaluation_captures_once_for_all_stages(captures: list[bool]) -> None:
    case = noisy()
    split, modules = halves_of(case)
    for _ in range(2):
        for module in (case.model, *modules):
            module.eval()
        assert torch.equal(run_modules(split, modules, case.tensors()), case.model(*case.args))
        for module in modules:
            module.train()
    assert captures == [True, False]


def test_a_mode_that_is_set_without_a_call_is_captured_when_it_runs(captures: list[bool]) -> None:
    case = noisy()
    split, modules = halves_of(case)
    for module in modules:
        module.training = False
    assert captures == [True]
    case.model.eval()
    assert torch.equal(run_modules(split, modules, case.tensors()), case.model(*case.args))
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


def test_stages_do_not_keep_the_model() -> None:
    case = noisy()
    split, modules = halves_of(case)
    model, weights = weakref.ref(case.model), weakref.ref(case.model[2].weight)
    del case, split, modules[1]
    gc.collect()
    assert model() is None
    assert weights() is None
    modules[0].eval()  # which captures it


def test_copies_of_a_stage_are_evaluated(captures: list[bool]) -> None:
    case = noisy()
    split, modules = halves_of(case)
    copies = [copy.deepcopy(module).eval() for module in modules]
    case.model.eval()
    assert torch.equal(run_modules(split, copies, case.tensors()), case.model(*case.args))
    modules[0].eval()
    assert captures == [True, False]


def test_a_model_that_cannot_be_copied_is_captured_at_once(captures: list[bool]) -> None:
    case = noisy()
    case.model.lock = threading.Lock()
    split, modules = halves_of(case)
    assert captures == [True, False]
    for module in (case.model, *modules):
        module.eval()
    assert torch.equal(run_modules(split, modules, case.tensors()), case.model(*case.args))
    assert captures == [True, False]


OUTSIDE = nn.Linear(4, 4).requires_grad_(False)


class ReadsAnother(nn.Module):
    """In evaluation it reads the module of which ``first`` is: one that hangs on the process."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = OUTSIDE, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.third(self.second((self.first if self.training else OUTSIDE)(x)))


def test_parameters_that_the_copy_does_not_have_are_refused() -> None:
    case = Case(ReadsAnother(), (torch.randn(2, 4),))
    split = cut(WholeModel.capture(case.model, case.args, case.kwargs), [1])
    modules = [split.build(index) for index in range(2)]
    assert torch.equal(run_modules(split, modules, case.tensors()), case.model(*case.args))
    with pytest.raises(PlanError, match="ReadsAnother reads parameters that are not registered"):
        modules[0].eval()(*case.args)
