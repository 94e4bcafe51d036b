"""Tensors that a forward sets as attributes of its modules: outputs of the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.errors import PythonStateError
from tests.semantics.against_autograd import assert_alike


class Router(nn.Module):
    """A router with an auxiliary loss, and the load of its experts."""

    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.trained, self.aux_loss = trained, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        aux_loss = shares.mean(0).square().sum()
        self.aux_loss = aux_loss if self.trained else aux_loss.detach()
        self.load = (shares.argmax(-1) == 0).sum()
        return x * shares


class Routed(nn.Module):
    """Two routers, whose losses are added up where the last one is done."""

    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.first, self.second = Router(trained=trained), Router(trained=trained)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.second(self.first(x)))
        self.aux_loss = self.first.aux_loss + self.second.aux_loss
        return y


def train(call: Any, model: Any) -> list[Tensor]:
    """Three microbatches and two steps, with losses of another attribute in each microbatch."""
    results = []
    for step in range(2):
        for weights in (0.1, 0.2), (0.0, 0.3), (0.4, 0.0):
            y = call(torch.randn(6, 4, generator=torch.Generator().manual_seed(step)))
            loss = y.square().mean()
            for weight, value in zip(weights, (model.aux_loss, model.first.aux_loss), strict=True):
                loss = loss + weight * value if weight else loss
            loss.backward()
            results += [model.aux_loss.detach(), model.first.load, model.second.load]
    return results


@pytest.mark.parametrize("fullgraph", [False, True])
def test_split_sets_them_with_their_history(fullgraph: bool) -> None:
    split = assert_alike(Routed(), train, fullgraph=fullgraph)
    assert len(split.functions) == 1
    names = [value.name for value in split.functions[0].capture.values]
    assert sorted(names) == [
        "self.aux_loss",
        "self.first.aux_loss",
        "self.first.load",
        "self.second.aux_loss",
        "self.second.load",
    ]


def test_a_check_compares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSPLIT_CHECK", "1")
    assert_alike(Routed(), train, fullgraph=True)


def test_the_module_that_is_there_gets_them() -> None:
    model = Routed()
    split = autosplit.split(model, fullgraph=True)
    for _ in range(2):
        split(torch.randn(6, 4))
    old = model.first
    before, model.first = old.aux_loss, Router()
    split(torch.randn(6, 4))
    assert old.aux_loss is before
    assert model.first.aux_loss.grad_fn is not None


def test_stages_set_them_in_each_forward() -> None:
    model = Routed(trained=False)
    twin = copy.deepcopy(model)
    stage = autosplit.Stage(model, torch.randn(6, 4))
    for microbatch in range(3):
        x = torch.randn(6, 4)
        (y,) = stage.forward(microbatch, [x])
        result = twin(x)
        result.sum().backward()
        stage.backward_input(microbatch, [torch.ones_like(y)])
        assert torch.equal(y, result)
        for module, plain in ((model.first, twin.first), (model.second, twin.second)):
            assert torch.equal(module.aux_loss, plain.aux_loss)
            assert torch.equal(module.load, plain.load)
        assert not model.aux_loss.requires_grad
    for microbatch in range(3):
        stage.backward_weight(microbatch)
    for name, parameter in twin.named_parameters():
        assert torch.equal(stage.gradients[name], parameter.grad)
    assert len(stage.captured) == 1


def test_stages_refuse_those_that_need_a_gradient() -> None:
    with pytest.raises(PythonStateError, match=r"state, self\.aux_loss, .*aux_losses="):
        autosplit.Stage(Routed(), torch.randn(6, 4))


class Smoothed(nn.Module):
    def __init__(self, effect: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.effect = nn.Linear(4, 4), effect
        self.mean, self.calls = torch.zeros(()), 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.effect(self, y.detach())
        return y


def smooth(model: Any, y: Tensor) -> None:
    model.mean = 0.9 * model.mean + 0.1 * y.mean()


def count(model: Any, y: Tensor) -> None:
    model.mean = y.mean()
    model.calls += 1


def fill(model: Any, y: Tensor) -> None:
    if not hasattr(model, "cache"):
        model.cache = torch.ones_like(y)


@pytest.mark.parametrize("effect", [smooth, count])
def test_what_the_next_call_reads_and_other_state_are_refused(effect: Any) -> None:
    with pytest.raises(PythonStateError, match=r"changes Python state, self\.(mean|calls)"):
        autosplit.Stage(Smoothed(effect), torch.randn(6, 4))
    assert_alike(
        Smoothed(effect),
        lambda call, model: [
            call(torch.ones(3, 4)).sum().backward() or model.mean for _ in range(4)
        ],
    )


def test_what_only_the_first_call_sets_is_no_output() -> None:
    stage = autosplit.Stage(Smoothed(fill), torch.randn(6, 4))
    assert stage.functions.capture.values == ()
