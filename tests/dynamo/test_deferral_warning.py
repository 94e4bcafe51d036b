"""A module of which less than half can wait says so, once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import DeferralWarning
from tests.dynamo.breaking import DisabledMiddle, TwoLayers


class Mostly(TwoLayers):
    """Both layers behind a function that runs without a graph."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def untraceable(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x))
        return result

    def forward(self, x: Tensor) -> Tensor:
        return self.untraceable(x)


class Setting(nn.Module):
    """The first call sets something, as transformers' classifiers do with labels."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.kind: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "regression"
        result: Tensor = self.inner(x)
        return result


def warned(model: nn.Module, *inputs: Tensor, calls: int = 2) -> list[str]:
    split = autosplit.split(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            split(*inputs)
    return [str(each.message) for each in caught if each.category is DeferralWarning]


def test_in_parts() -> None:
    (message,) = warned(Mostly(), torch.randn(3, 4))
    assert message.startswith("Mostly: 0% of the weight gradients wait for backward_weight()")
    assert "test_deferral_warning.py" in message
    assert "torch.compiler.disable" in message
    assert message.endswith("report() says more")


def test_in_one_graph() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    model = nn.LayerNorm(4)
    (message,) = warned(model, x)
    assert "what makes that of weight, bias makes input gradients, too" in message
    split = autosplit.split(model)
    split(x)
    assert "native_layer_norm_backward" in split.report().split("Not deferred")[1]


@pytest.mark.parametrize(
    "model",
    [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), DisabledMiddle(), nn.ReLU()],
)
def test_not_where_half_can_wait(model: nn.Module) -> None:
    assert not warned(model, torch.randn(3, 4, requires_grad=True))


def test_not_of_a_first_call_that_differs() -> None:
    """It runs without a graph; the calls after it do not."""
    assert not warned(Setting(nn.Linear(4, 4)), torch.randn(3, 4), calls=3)


def test_of_the_calls_after_it() -> None:
    (message,) = warned(Setting(Mostly()), torch.randn(3, 4), calls=3)
    assert "0% of the weight gradients wait" in message
