"""Operators that address memory by strides."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import SplitError
from autosplit.dynamo.partial_model import Partial
from tests.semantics.against_autograd import assert_equals_autograd, both_modes


class Addressing(nn.Module):
    """The batch norm's fake keeps the strides of its transposed input, the kernel does not."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(6)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).transpose(1, 2).contiguous().transpose(1, 2)
        return self.make(self.norm(h)).square()


def own_strides(h: Tensor) -> Tensor:
    return h.as_strided(h.shape, h.stride())


def windows(h: Tensor) -> Tensor:
    return h.as_strided((2, 5, 8), (24, 4, 1))


@pytest.mark.parametrize("make", [own_strides, windows])
@pytest.mark.parametrize("face", [autosplit.split, Partial], ids=["whole", "parts"])
def test_kernel_with_other_strides_than_its_fake_is_refused(
    face: Callable[[nn.Module], Callable[[Tensor], Tensor]], make: Callable[[Tensor], Tensor]
) -> None:
    expected = (
        r"as_strided\.default \(of .*test_strides.py:\d+ return h\.as_strided.* strides "
        r"\(24, 1, 6\), as tracing saw it; call contiguous\(\).*strides \(24, 4, 1\)"
    )
    with pytest.raises(SplitError, match=expected):
        face(Addressing(make))(torch.randn(2, 6, 4))


@both_modes
@pytest.mark.parametrize("make", [own_strides, windows])
def test_what_the_error_advises(make: Callable[[Tensor], Tensor], training: bool) -> None:
    model = Addressing(lambda h: make(h.contiguous())).train(training)
    batch = [(torch.randn(2, 6, 4).requires_grad_(),) for _ in range(2)]
    assert_equals_autograd(model, batch)


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h.as_strided((len(x), 3, 2), (4, 1, 1)).square()


def test_sizes_that_vary() -> None:
    """Where strides are symbols they cannot be checked; the graph runs as Dynamo made it."""
    model = Windows()
    plain = copy.deepcopy(model)
    split = Partial(model)
    batches = [torch.randn(rows, 4) for rows in (2, 3, 5)]
    for module in (split, plain):
        for batch in batches:
            module(batch).sum().backward()
    split.backward_weight()
    first, *others = split.parts
    assert first.is_split
    assert others
    assert not any(part.is_split for part in others)
    assert "as_strided.default addresses memory in a graph whose sizes vary" in split.report()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)  # added up in another order
