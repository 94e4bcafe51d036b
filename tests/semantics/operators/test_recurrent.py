"""Recurrent layers, with the dropout between them that torch's decomposition leaves out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.dynamo.backend import SplittingBackend
from tests.semantics.against_autograd import assert_equals_autograd, both_modes, within

CASES: dict[str, dict[str, Any]] = {
    "LSTM": {"batch_first": True},
    "GRU": {"bidirectional": True},
    "RNN": {"bias": False, "nonlinearity": "relu"},
}


def layers(name: str, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    given = {"num_layers": 2, "dropout": 0.5, **CASES[name], **options}
    return getattr(nn, name)(4, 4, **given)


@both_modes
@pytest.mark.parametrize("name", CASES)
def test_equals_autograd(name: str, training: bool) -> None:
    batch = [(torch.randn(2, 2, 4),) for _ in range(2)]
    # Autograd runs a fused kernel where there is one.
    split = assert_equals_autograd(layers(name).train(training), batch, compare=within(2e-6))
    assert len(split.functions) == 1  # a whole graph, no parts


@pytest.mark.parametrize(("bidirectional", "training"), [(False, True), (True, False)])
def test_states_of_an_lstm(bidirectional: bool, training: bool) -> None:
    """torch 2.11's decomposition returns them with a dimension too many."""
    layer = nn.LSTM(4, 5, 2, bidirectional=bidirectional).train(training)
    x = torch.randn(3, 2, 4)
    expected = layer(x)[1]
    found = autosplit.split(layer, fullgraph=True)(x)[1]
    for state, other in zip(found, expected, strict=True):
        assert state.shape == other.shape
        torch.testing.assert_close(state, other)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_as_near_as_autograd(name: str) -> None:
    """Autograd's fused kernel rounds once; a product a step would round at every step."""
    wide = layers(name, num_layers=1, dropout=0.0).eval().double()
    model = copy.deepcopy(wide).bfloat16()
    wide.load_state_dict(model.state_dict())
    x = torch.randn(12, 4, 4).bfloat16()

    def run(module: nn.Module, x: Tensor) -> list[Tensor]:
        module.zero_grad()
        output = module(x)[0]
        output.sum().backward()
        if isinstance(module, autosplit.SplitModule):
            module.backward_weight()
        return [output.detach(), *(parameter.grad for parameter in module.parameters())]

    exact = run(wide, x.double())
    theirs, mine = run(copy.deepcopy(model), x), run(autosplit.split(model, fullgraph=True), x)

    def error(found: list[Tensor]) -> float:
        pairs = zip(found, exact, strict=True)
        return max((a.double() - b).abs().max().item() / b.abs().max().item() for a, b in pairs)

    assert error(mine) <= 1.2 * error(theirs)


class WithState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(4, 4, 2, dropout=0.25)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        torch._dynamo.graph_break()
        return self.inner(x, state)


@both_modes
def test_models_in_parts_with_a_state_of_their_own(training: bool) -> None:
    shapes = [(2, 3, 4), (2, 3, 4)]
    batch = [tuple(torch.randn(shape).requires_grad_() for shape in shapes) for _ in range(2)]
    assert_equals_autograd(WithState().train(training), batch, compare=within(2e-6))


def test_torch_compile() -> None:
    model = layers("LSTM")
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=SplittingBackend(), fullgraph=True)
    batch = torch.randn(2, 2, 4)
    with torch._dynamo.config.patch(allow_rnn=True):
        for module in (compiled, plain):
            torch.manual_seed(1)
            for output in [module(batch)[0], module(batch)[0]]:
                output.square().sum().backward()
    autosplit.backward_weight(model)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
