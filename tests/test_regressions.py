"""Bugs that were there once. Each test tells its story."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import autosplit
from autosplit import SplitError
from tests.semantics.against_autograd import assert_equals_autograd, within


def backward_twice(model: nn.Module, *shapes: tuple[int, ...]) -> None:
    """Two pending microbatches of each shape; the gradients must be autograd's."""
    split = autosplit.split(model)
    batches = [torch.randn(shape) for shape in shapes for _ in range(2)]
    for batch in batches:
        split(batch).square().sum().backward()
    split.backward_weight()
    mine = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for batch in batches:
        model(batch).square().sum().backward()
    for grad, parameter in zip(mine, model.parameters(), strict=True):
        assert torch.equal(grad, parameter.grad)


def test_second_capture_of_one_class() -> None:
    """Dynamo keeps what it learned about shapes with the code object, so the second
    ``nn.Sequential`` of a process, at another shape, came back with symbolic sizes: the cut
    then had to carry a number and failed, but only if some other model was captured first.
    """
    backward_twice(nn.Sequential(nn.Linear(4, 4)), (2, 4))
    backward_twice(nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1)), (2, 3, 8, 8))


def test_weight_gradient_of_a_norm_that_starts_in_i() -> None:
    """``native_layer_norm_backward`` yields a tuple, and the gradients of weight and bias are
    items of it. They were pinned to W like any operator of unknown cost, which asked the cut
    to carry the tuple itself.
    """
    backward_twice(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), (2, 4))


class AttentionThenBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.norm(mixed.transpose(1, 2)).transpose(1, 2)


def test_kernel_that_gives_other_strides_than_its_fake() -> None:
    """Fake batch norm keeps the strides of a transposed input, the real one does not. Where
    autograd reshapes, tracing saw that a view would do, and the real tensor could not be viewed.
    """
    model = AttentionThenBatchNorm().double()
    split = autosplit.split(model)
    for _ in range(2):
        split(torch.ones(2, 4, 8).double().cumsum(1)).square().sum().backward()
    split.backward_weight()
    mine = model.attention.out_proj.weight.grad.clone()
    model.zero_grad()
    for _ in range(2):
        model(torch.ones(2, 4, 8).double().cumsum(1)).square().sum().backward()
    torch.testing.assert_close(mine, model.attention.out_proj.weight.grad)


class Rounded(nn.Module):
    """Parameters whose gradient is the same whatever the output's is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cut, self.power, self.rounded = (nn.Parameter(torch.randn(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.cat([self.cut[:0], self.power**0]) + self.rounded.round()


def test_gradient_that_does_not_depend_on_the_outputs() -> None:
    """They were taken for gradients of what no output is computed from, and were None where
    autograd has zeros, with which an optimizer goes on decaying weights.
    """
    batches = [(torch.randn(3, 4).requires_grad_(),) for _ in range(2)]
    assert_equals_autograd(Rounded(), batches, compare=within(1e-5), backend="inductor")


def test_module_that_holds_torchscript() -> None:
    """TorchScript keeps submodules in tables that cannot be iterated over: a KeyError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(4, 4))
        split = autosplit.split(nn.Sequential(scripted, nn.Linear(4, 4)))
    assert len(list(split.parameters())) == 4
    with pytest.raises(SplitError, match=r"RecursiveScriptModule is TorchScript.*made from"):
        autosplit.split(scripted)


class CachesParametrizations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.linear(self.linear(x).relu())


def test_global_cache_that_a_forward_fills() -> None:
    """The forward was tried on a copy without data, and the module that holds the cache was put
    back, but not what the cache held: the first real call read tensors without data from it.
    """
    backward_twice(CachesParametrizations(), (2, 4))
