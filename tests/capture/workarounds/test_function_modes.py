"""A model captured under a default device is one graph, which creates tensors on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import autosplit
from autosplit import Stage
from autosplit.torch_internals import TORCH
from tests.zoo import Made


def shifted() -> nn.Module:
    """Makes tensors in its forward, on the default device."""
    return Made(
        lambda m, x: m.layer(x + torch.arange(4.0)) * torch.full((4,), 2.0), layer=nn.Linear(4, 4)
    )


def test_a_model_is_split_as_one_graph_under_a_default_device() -> None:
    with torch.device("cpu"):
        model = shifted()
        split, x = autosplit.split(model), torch.randn(2, 4)
        modes = torch.overrides._get_current_function_mode_stack()
        split(x).sum().backward()
        assert torch.overrides._get_current_function_mode_stack() == modes
        assert "graph by graph" not in str(split.report())
        results = [parameter.grad for parameter in split.parameters()]
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(map(torch.equal, results, expected))


@pytest.mark.skipif(TORCH < (2, 12), reason="nor does torch.compile of torch 2.11")
def test_a_stage_is_made_under_a_default_device() -> None:
    with torch.device("meta"):
        stage = Stage(shifted(), [torch.ones(2, 4, requires_grad=True)])
    ((shape, _, _),) = stage.output_specs
    assert tuple(shape) == (2, 4)


class Doubling(TorchFunctionMode):
    """Doubles the results of ``relu``."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is nn.functional.relu else result


def test_a_mode_of_the_call_acts_once() -> None:
    model = Made(lambda m, x: nn.functional.relu(m.layer(x)), layer=nn.Linear(4, 4))
    split, x = autosplit.split(model), torch.randn(2, 4)
    with Doubling():
        assert torch.equal(split(x), model(x))
    assert torch.equal(split(x), model(x))
