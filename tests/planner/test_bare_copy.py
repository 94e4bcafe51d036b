"""Copies of models without the memory of their parameters."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.planner.captured_model import NotCopiedError, bare_copy


class Tied(nn.Module):
    """Two names of one parameter, a buffer, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.shift = torch.ones(4)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x)) * self.scale + self.shift


def test_parameters_have_no_memory_and_stay_tied() -> None:
    model = Tied().eval()
    model.second.bias.requires_grad_(False)
    copied: Any = bare_copy(model)
    assert all(p.is_meta for p in copied.parameters())
    assert copied.first.weight is copied.second.weight
    assert not copied.second.bias.requires_grad
    assert not copied.second.training
    assert copied.scale is model.scale
    assert copied.shift is model.shift


def test_the_model_can_go() -> None:
    model = Tied()
    weights = weakref.ref(model.first.weight)
    copied = bare_copy(model)
    del model
    assert weights() is None
    assert len(list(copied.parameters())) == 2


def lock(model: Any) -> None:
    model.lock = threading.Lock()


def parameter_in_a_list(model: Any) -> None:
    model.others = [nn.Parameter(torch.ones(4))]


def closure_over_itself(model: Any) -> None:
    model.forward = lambda x: Tied.forward(model, x)


def closure_over_a_weight(model: Any) -> None:
    weight = model.first.weight
    model.first.register_forward_pre_hook(lambda module, args: (args[0] * weight.sum(),))


def lazy_parameter(model: Any) -> None:
    model.late = nn.LazyLinear(4)


@pytest.mark.parametrize(
    "change",
    [lock, parameter_in_a_list, closure_over_itself, closure_over_a_weight, lazy_parameter],
)
def test_refuses_where_a_copy_would_not_stand_for_the_model(change: Any) -> None:
    model = Tied()
    bare_copy(model)
    change(model)
    with pytest.raises(NotCopiedError):
        bare_copy(model)


def test_bound_methods_are_those_of_the_copy() -> None:
    model: Any = Tied()
    model.call = model.second.forward
    model.partial = functools.partial(Tied.forward, model)
    copied: Any = bare_copy(model)
    assert copied.call.__self__ is copied.second
    assert copied.partial.args == (copied,)
