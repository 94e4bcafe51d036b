"""Bugs that were there once. Each test tells its story."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import autosplit
from autosplit import SplitError
from tests.semantics.against_autograd import (
    assert_alike,
    assert_equals_autograd,
    mean_square,
    one_by_one,
    within,
)
from tests.zoo import Made, layered


def test_kernels_may_return_other_strides_than_their_fake_kernels() -> None:
    """Fake batch norm keeps the strides of a transposed input, the real one does not. Where
    autograd reshapes, tracing saw that a view would do, and the real tensor could not be viewed.
    """
    x = torch.ones(2, 4, 8).double().cumsum(1)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = Made(
        lambda m, x: m.norm(m.attention(x, x, x, need_weights=False)[0].mT).mT,
        attention=attention,
        norm=nn.BatchNorm1d(8),
    ).double()
    compare = torch.testing.assert_close  # a bias's gradient is nearly zero
    assert_equals_autograd(model, [(x,)] * 2, compare=lambda _, *both: compare(*both))


def rounded() -> nn.Module:
    """Parameters whose gradient is the same whatever the output's is."""
    return layered(
        lambda m, x: m.linear(x) + torch.cat([m.cut[:0], m.power**0]) + m.rounded.round(),
        **{name: nn.Parameter(torch.randn(4)) for name in ("cut", "power", "rounded")},
    )


def test_a_gradient_that_depends_on_no_output_is_zeros() -> None:
    """They were taken for gradients of what no output is computed from, and were None where
    autograd has zeros, with which an optimizer goes on decaying weights.
    """
    batches = [(torch.randn(3, 4).requires_grad_(),) for _ in range(2)]
    assert_equals_autograd(rounded(), batches, compare=within(1e-5), backend="inductor")


def test_a_module_that_contains_torchscript_is_split() -> None:
    """TorchScript keeps submodules in tables that cannot be iterated over: a KeyError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(4, 4))
        split = autosplit.split(nn.Sequential(scripted, nn.Linear(4, 4)))
    assert len(list(split.parameters())) == 4
    with pytest.raises(
        SplitError, match=r"RecursiveScriptModule is TorchScript.*scripted or traced"
    ):
        autosplit.split(scripted)


def caches_parametrizations(model: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return model.linear(model.linear(x).relu())


def test_a_global_cache_that_a_forward_fills_holds_real_tensors() -> None:
    """The forward was tried on a copy without data, and the module that holds the cache was put
    back, but not what the cache held: the first real call read tensors without data from it.
    """
    batches = [(torch.randn(2, 4),)] * 2
    model = Made(caches_parametrizations, linear=parametrizations.weight_norm(nn.Linear(4, 4)))
    assert_alike(model, lambda call, _: one_by_one(call, batches, mean_square))
