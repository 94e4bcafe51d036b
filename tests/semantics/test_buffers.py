"""Buffers that the forward reads and writes, as each microbatch saw them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError
from tests.semantics.against_autograd import (
    assert_equals_autograd,
    assert_same,
    assert_same_state,
    both_modes,
    mean_square,
    one_by_one,
)


class Buffered(nn.Module):
    def __init__(self, make: Callable[[Any, Tensor], Tensor], **buffers: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, value in buffers.items():
            self.register_buffer(name, value)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return self.make(self, x)


def batches() -> list[tuple[Tensor]]:
    return [(torch.randn(2, 4).requires_grad_(),) for _ in range(3)]


def counter_last(module: Any, x: Tensor) -> Tensor:
    y = module.linear(x) + module.count
    module.count += 1
    return y


def running_cache(module: Any, x: Tensor) -> Tensor:
    module.cache[:, 2:] = module.linear(x)[:, :2].detach()
    return module.linear(x) + module.cache


def running_mean(module: Any, x: Tensor) -> Tensor:
    h = module.linear(x)
    with torch.no_grad():
        module.mean.lerp_(h.mean(0), 0.1)
    return h - module.mean


@both_modes
@pytest.mark.parametrize(
    ("make", "buffers"),
    [
        (counter_last, {"count": torch.zeros(())}),
        (running_cache, {"cache": torch.zeros(2, 4)}),
        (running_mean, {"mean": torch.zeros(4)}),
    ],
)
def test_equals_autograd(
    make: Callable[[Any, Tensor], Tensor], buffers: dict[str, Tensor], training: bool
) -> None:
    model = Buffered(make, **{name: value.clone() for name, value in buffers.items()})
    assert_equals_autograd(model.train(training), batches())


@both_modes
@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        nn.Sequential(nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True)),
    ],
    ids=["batch norm", "instance norm"],
)
def test_running_statistics(model: nn.Module, training: bool) -> None:
    shape = (3, 4) if isinstance(model[0], nn.Linear) else (3, 2, 5)
    batch = [(torch.randn(shape).requires_grad_(),) for _ in range(2)]
    assert_equals_autograd(copy.deepcopy(model).train(training), batch)


def test_a_backward_reads_the_value_of_its_own_forward() -> None:
    """Autograd refuses to go back once the buffer was written; the graph kept a copy."""
    model = Buffered(lambda m, x: m.linear(x) * m.count.add_(1.0), count=torch.zeros(()))
    plain = copy.deepcopy(model)
    split = autosplit.split(model)
    inputs = batches()
    losses = [mean_square(split(*batch)) for batch in inputs]
    for loss in losses:
        loss.backward()
    split.backward_weight()
    one_by_one(plain, inputs, mean_square)
    assert_same_state(model, plain, assert_same)


class Twice(nn.Module):
    """One buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("a", torch.ones(4))
        self.register_buffer("b", self.a)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.b
        self.a.add_(1.0)
        self.b.mul_(2.0)
        return y


def test_one_buffer_under_two_names() -> None:
    assert_equals_autograd(Twice(), batches())


class Aliasing(nn.Module):
    """A buffer that is a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("a", torch.zeros(2, 4))
        self.register_buffer("b", self.a[0])

    def forward(self, x: Tensor) -> Tensor:
        self.a.add_(1.0)
        return self.linear(x) * self.b


def test_buffers_that_share_memory_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"ViewBaseAOTInput.*'b'"):
        autosplit.split(Aliasing()).capture(torch.randn(2, 4))
