"""``torch.autograd.grad`` and ``backward(inputs=...)`` of a split module's parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import SplitError
from tests.dynamo.breaking import TwoLayers


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def many() -> nn.Module:
    """More parameters than are tied to the graph."""
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])


Asks = Callable[[Tensor, Sequence[Tensor]], Any]

ASKS: dict[str, Asks] = {
    "inputs": lambda loss, requested: loss.backward(inputs=requested),
    "grad": lambda loss, requested: torch.autograd.grad(loss, requested),
    "unused": lambda loss, requested: torch.autograd.grad(loss, requested, allow_unused=True),
    "retain": lambda loss, requested: torch.autograd.grad(loss, requested, retain_graph=True),
}

WAYS = pytest.mark.parametrize("build", [layers, TwoLayers])


def batch() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(3, 4, requires_grad=True)


@pytest.mark.parametrize(
    ("build", "with_input", "ask"),
    [
        (layers, False, "inputs"),
        (layers, True, "grad"),
        (layers, True, "unused"),
        (many, False, "grad"),
        (TwoLayers, False, "inputs"),
        (TwoLayers, False, "grad"),
        (TwoLayers, False, "retain"),
    ],
)
def test_refused_with_advice_that_works(
    build: Callable[[], nn.Module], with_input: bool, ask: str
) -> None:
    plain = build()
    split = autosplit.split(copy.deepcopy(plain))
    x, inputs = batch(), [*plain.parameters()]
    expected = torch.autograd.grad(plain(x).square().sum(), inputs)
    parameters = [*split.parameters()]
    requested = [x, *parameters] if with_input else parameters
    with pytest.raises(SplitError, match=r"Call loss\.backward\(\) and read \.grad, or compute"):
        ASKS[ask](split(x).square().sum(), requested)
    assert split.pending == 0
    assert all(parameter.grad is None for parameter in parameters)
    result = torch.autograd.grad(split.model(x).square().sum(), parameters)
    assert all(map(torch.equal, result, expected))
    split(x).square().sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(parameters, expected, strict=True))


def test_advice_under_torch_compile() -> None:
    """A compiled model has no ``.unsplit``."""
    model = layers()
    compiled = torch.compile(model, backend="autosplit")
    parameters = [*model.parameters()]
    asks = (ASKS["inputs"], ASKS["grad"], partial(torch.autograd.grad, create_graph=True))
    for ask in asks:
        with pytest.raises(SplitError, match=r"the model without torch\.compile") as raised:
            ask(compiled(batch()).sum(), parameters)
        assert "unsplit" not in str(raised.value)


@pytest.mark.parametrize("build", [many, TwoLayers])
def test_one_parameter_of_those_near_the_ends(build: Callable[[], nn.Module]) -> None:
    split = autosplit.split(build())
    parameters = [*split.parameters()]
    for which in (0, 1, -2, -1):
        with pytest.raises(SplitError, match="requests gradients of parameters"):
            torch.autograd.grad(split(batch()).sum(), parameters[which], allow_unused=True)


@WAYS
def test_input_gradients_as_ever(build: Callable[[], nn.Module]) -> None:
    plain = build()
    split = autosplit.split(copy.deepcopy(plain))
    results = []
    for model in (plain, split):
        x = batch()
        loss = model(x).square().sum()
        loss.backward(inputs=[x], retain_graph=True)
        (again,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([again, x.grad, *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *results))


@WAYS
def test_create_graph_of_parameters(build: Callable[[], nn.Module]) -> None:
    split = autosplit.split(build())
    with pytest.raises(SplitError, match="create_graph=True"):
        torch.autograd.grad(split(batch()).sum(), [*split.parameters()], create_graph=True)
