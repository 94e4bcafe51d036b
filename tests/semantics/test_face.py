"""A split module under the hands of those who take it for the model: libraries, above all."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.errors import FailingCallError
from tests.semantics.against_autograd import assert_alike


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, mask: Tensor | None = None, *, scale: int = 1) -> Tensor:
        return self.linear(input_ids) * scale


class Endless(Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self(self.linear(x))


def _x() -> Tensor:
    return torch.ones(3, 4)


def _trains(split: Any) -> None:
    split(_x()).sum().backward()
    assert split.pending == 1
    split.backward_weight()
    assert split.model.linear.weight.grad is not None


def test_forward_that_is_replaced() -> None:
    split = autosplit.split(Model())
    expected = split(_x())
    old = split.forward
    split.forward = lambda *args, **kwargs: old(*args, **kwargs) * 2
    assert torch.equal(split(_x()), expected * 2)
    _trains(split)
    assert "forward" not in vars(split.model)
    assert torch.equal(split.model(_x()), expected)
    del split.forward
    assert split.forward == old
    assert torch.equal(split(_x()), expected)


def test_forward_under_mixed_precision_of_accelerate() -> None:
    """Its steps: the method's function is wrapped twice, kept, and unwrapped in the end."""

    def to_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            return function(*args, **kwargs).float()

        return forward

    def drive(module: Any, _: nn.Module) -> None:
        module._original_forward = module.forward
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        module.forward = MethodType(autocast(module.forward.__func__), module)
        module.forward = MethodType(to_float32(module.forward.__func__), module)
        for scale in (1, 2):
            module(_x(), scale=scale).square().sum().backward()

    split = assert_alike(Model(), drive, pending=2)
    forward, original = split.forward, split.__dict__.pop("_original_forward")
    while hasattr(forward, "__wrapped__") and forward != original:
        forward = forward.__wrapped__
    split.forward = MethodType(forward, split)
    assert split(_x()).dtype == torch.float32
    _trains(split)


@pytest.mark.parametrize("captured", [False, True], ids=["first call", "captured"])
def test_model_that_calls_its_split_module(captured: bool) -> None:
    split = autosplit.split(Model())
    if captured:
        split(_x())
    old = split.forward
    split.model.forward = lambda *args: old(*args)
    with pytest.raises(FailingCallError, match="which calls this forward again"):
        split(_x())
    del split.model.forward
    _trains(split)


def test_endless_recursion() -> None:
    """With few frames left, of which each takes time."""
    earlier = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 400)
    try:
        _recurses()
    finally:
        sys.setrecursionlimit(earlier)


def _recurses() -> None:
    with pytest.raises(RecursionError):
        autosplit.split(Endless())(_x())
    split = autosplit.split(Model())
    split.forward = lambda x: split(x)
    with pytest.raises(RecursionError):
        split(_x())


def test_signature_of_forward() -> None:
    model = Model()
    split = autosplit.split(model)
    assert inspect.signature(split.forward) == inspect.signature(model.forward)
    assert inspect.signature(copy.deepcopy(split).forward) == inspect.signature(model.forward)


def test_containers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    split = autosplit.split(model)
    for built in (split, pickle.loads(pickle.dumps(split)), copy.deepcopy(split)):
        assert len(built) == 3
        assert isinstance(built[-1], nn.Linear)
        assert [type(item) for item in built] == [nn.Linear, nn.ReLU, nn.Linear]
        assert type(built[:2]) is nn.Sequential
        assert torch.equal(built(_x()), model(_x()))
    assert split[0] is model[0]
    assert model[1] in list(split)
    assert not autosplit.split(nn.Sequential())
    other = autosplit.split(Model())
    assert other
    with pytest.raises(TypeError, match="has no len"):
        len(other)


def test_classes() -> None:
    """By ``isinstance`` and ``__class__`` it is a model, by ``type`` a split module."""
    split = autosplit.split(Model())
    for built in (split, copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
        assert isinstance(built, Model)
        assert isinstance(built, autosplit.SplitModule)
        assert type(built) is autosplit.SplitModule
        assert built.__class__ is Model
        assert built._get_name() == "Model"
        assert repr(built).startswith("SplitModule(Model(")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    model = Model()
    split = autosplit.split(model)
    exported = torch.export.export(split, (_x(),), strict=strict)
    assert torch.equal(exported.module()(_x()), model(_x()))
    _trains(split)
    assert len(split.functions) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_traced() -> None:
    model = Model()
    split = autosplit.split(model)
    traced = torch.jit.trace(split, _x())
    assert torch.equal(traced(_x()), model(_x()))
    _trains(split)


class Headed(nn.Module):
    """Keeps its body under the name that most models of transformers have for theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))


def test_a_submodule_called_model_is_found_under_its_name() -> None:
    """By dotted names, as adapters are put in place, and by attributes, as functional_call goes."""
    model = Headed()
    split = autosplit.split(model)
    assert split.model is model.model
    assert split.unsplit is model
    assert split.get_submodule("model.0") is model.model[0]
    assert split.get_parameter("model.0.weight") is model.model[0].weight
    doubled = {name: 2 * value.detach() for name, value in split.named_parameters()}
    called = torch.func.functional_call(split, doubled, (_x(),))
    assert torch.equal(called, torch.func.functional_call(model, doubled, (_x(),)))
    split.model = body = nn.Linear(4, 4)
    assert model.model is body
    assert torch.equal(split(_x()), model(_x()))
    assert copy.deepcopy(split).unsplit is not model


def test_without_one_it_is_the_model_itself() -> None:
    model = Model()
    split = autosplit.split(model)
    assert split.model is split.unsplit is model
    assert not hasattr(split, "nothing")
