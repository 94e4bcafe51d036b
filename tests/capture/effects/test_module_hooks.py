"""Module hooks that no graph contains are refused, with advice that works."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError, DeferralWarning
from tests.gradients import assert_same_gradients
from tests.zoo import Made

FILE = __file__
SEEN: list[Any] = []


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def note(module: nn.Module, *args: Any) -> None:
    SEEN.append(module)


def batch() -> Tensor:
    return torch.randn(3, 4, requires_grad=True)


def warning_of(model: nn.Module) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        autosplit.split(model)(batch())
    (result,) = [str(warning.message) for warning in caught if warning.category is DeferralWarning]
    return result


REGISTER: dict[str, Callable[[nn.Module], object]] = {
    "full": lambda module: module.register_full_backward_hook(note),
    "full_pre": lambda module: module.register_full_backward_pre_hook(note),
}


@pytest.mark.parametrize("kind", REGISTER)
def test_backward_hook_of_a_submodule(kind: str) -> None:
    model = layers()
    REGISTER[kind](model[2])
    reason = f"2 (Linear) has a backward hook (at {FILE}:{note.__code__.co_firstlineno})"
    warned = warning_of(model)
    assert f"because {reason}, which a graph cannot contain. Split the submodules" in warned
    assert "instead of the whole module. In a pipeline stage, hook its parameters, or " in warned
    for options in ({"fullgraph": True}, {"memory": "lean"}):
        with pytest.raises(CaptureError) as caught:
            autosplit.split(model, **options)(batch())  # type: ignore[arg-type]
        assert reason in str(caught.value)
    model[0] = autosplit.split(model[0], fullgraph=True)  # as advised
    SEEN.clear()
    model(batch()).sum().backward()
    assert (model[0].pending, len(SEEN)) == (1, 1)


@pytest.mark.parametrize("kind", REGISTER)
def test_backward_hook_of_the_model(kind: str) -> None:
    model = layers()
    REGISTER[kind](model)
    assert "Put it on the split module instead" in warning_of(model)
    split = autosplit.split(layers(), fullgraph=True)
    REGISTER[kind](split)
    SEEN.clear()
    split(batch()).sum().backward()
    assert (split.pending, len(SEEN)) == (1, 1)


def test_backward_hook_of_all_modules() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(note)  # type: ignore[no-untyped-call]
    try:
        with pytest.raises(
            CaptureError, match=r"every module .* has a backward hook .*test_module"
        ):
            autosplit.split(layers(), fullgraph=True)(batch())
    finally:
        handle.remove()


def test_forward_hook_that_keeps_something_is_named() -> None:
    model = layers()
    model[0].register_forward_hook(note)
    line = note.__code__.co_firstlineno
    split = autosplit.split(model, fullgraph=True)
    split(batch())
    with pytest.raises(CaptureError, match=rf"note \(at {FILE}:{line + 1}\) changes"):
        split(batch())


def test_spectral_norm_by_a_hook() -> None:
    """The weight that it sets is there after each call, in parts; one graph refuses it."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
    twin = copy.deepcopy(model)
    split = autosplit.split(model)
    for _ in range(2):
        inputs = batch()
        for network in (split, twin):
            network(inputs).square().sum().backward()
        assert torch.equal(model[0].weight, twin[0].weight)
    split.backward_weight()
    assert_same_gradients(model, twin)
    with pytest.raises(CaptureError, match=r"changes Python state, self\.0"):
        autosplit.partition(model, batch(), stages=1, microbatches=1, costs="estimate")


def under_hooks(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model.inner(x)


def test_saved_tensors_hooks_inside() -> None:
    model = Made(under_hooks, inner=layers())
    with pytest.raises(CaptureError, match="Put these hooks around the call of the") as caught:
        autosplit.split(model, fullgraph=True)(batch())
    assert f"at {FILE}:" in str(caught.value)
    assert "Put these hooks around the call of the split module" in warning_of(model)
    with torch.autograd.graph.save_on_cpu():  # as advised
        split = autosplit.split(model.inner, fullgraph=True)
        split(batch()).sum().backward()
    assert split.pending == 1


def test_an_error_of_its_own_is_not_blamed_on_a_hook() -> None:
    model = layers()
    model[2].register_full_backward_hook(note)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        autosplit.split(model)(torch.randn(3, 5))
