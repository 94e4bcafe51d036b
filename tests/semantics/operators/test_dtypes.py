"""Precisions, autocast, complex numbers, memory formats, and numbers that are no tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosplit
from autosplit import SplitError
from tests.dynamo.by_graphs import split_by_graphs
from tests.semantics.against_autograd import assert_alike, assert_equals_autograd, leaves
from tests.zoo import Made, layered

# --- autocast, other precisions, complex numbers, memory formats ----------------------------------


def mlp(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64], ids=str)
def test_precisions(dtype: torch.dtype) -> None:
    batch = leaves(3, 4, dtype=dtype)
    assert_equals_autograd(mlp(dtype), batch)


def spectrum(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    result = torch.fft.fft(module.linear(x))
    return torch.fft.rfft(module.linear(x)), result.conj() * torch.fft.fft(x)


def test_real_to_complex_and_conjugates() -> None:
    batch = leaves(3, 4)
    assert_equals_autograd(layered(spectrum), batch)


@pytest.mark.parametrize(
    "product",
    [
        lambda model, x: (x * model.weight.conj()).real,
        lambda model, x: torch.complex(x, x) @ model.weight.mH,
    ],
    ids=["conj", "mH"],
)
def test_gradients_that_are_conjugated_when_read(product: Callable[[Any, Tensor], Tensor]) -> None:
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    assert_equals_autograd(Made(product, weight=weight), leaves(4, 4))


@pytest.mark.parametrize(("dtype", "training"), [(torch.float32, True), (torch.bfloat16, False)])
def test_channels_last(dtype: torch.dtype, training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3))
    model = model.to(dtype).to(memory_format=torch.channels_last).train(training)
    images = [torch.randn(2, 3, 8, 8, dtype=dtype) for _ in range(2)]
    batch = [(i.to(memory_format=torch.channels_last).requires_grad_(),) for i in images]
    assert_equals_autograd(model, batch)


class Mixed(nn.Module):
    """Autocast operators, full-precision ones, and a part that switches autocast off."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.exact = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.softmax(self.norm(F.gelu(self.first(x))), -1).exp()
        with torch.autocast("cpu", enabled=False):
            h = self.exact(h.float())
        return self.last(h)


def under_autocast(
    model: nn.Module, face: str, backward: Callable[[], AbstractContextManager[None]] = nullcontext
) -> None:
    """Two microbatches, their forwards under autocast."""
    batches = [torch.randn(5, 4) for _ in range(2)]

    def drive(call: Any, model: nn.Module) -> list[Tensor]:
        outputs = []
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs.append(call(batch))
            with backward():
                outputs[-1].float().square().mean().backward()
        if call is not model:
            assert call.pending == 2
            with torch.autocast("cpu", dtype=torch.bfloat16):
                call.backward_weight()
        return outputs

    assert_alike(model, drive, face=FACES[face])


FACES: dict[str, Callable[[nn.Module], Any]] = {
    "whole": partial(autosplit.split, max_pending=math.inf),
    "parts": split_by_graphs,
}


@pytest.mark.parametrize("face", FACES)
def test_autocast_around_the_forward(face: str) -> None:
    under_autocast(Mixed(), face)


@pytest.mark.parametrize("face", FACES)
def test_backward_inside_autocast(face: str) -> None:
    """The same, where all products of the forward were autocast as well."""
    model = nn.Sequential(mlp(torch.float32), nn.LayerNorm(4), nn.Softmax(-1))
    under_autocast(model, face, partial(torch.autocast, "cpu", dtype=torch.bfloat16))


@pytest.mark.parametrize("face", FACES)
def test_backward_that_autocast_would_change_is_refused(face: str) -> None:
    split = FACES[face](Mixed())
    outputs = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(split(torch.randn(5, 4)).float().sum())
            expected = r"would run aten\.mm\.default \(of .*test_dtypes.py:\d+ h = self\.exact"
            with pytest.raises(SplitError, match=expected):
                outputs[-1].backward(retain_graph=True)
    for output in outputs:
        output.backward()  # nothing was lost
    assert split.pending == 2
    split.backward_weight()


def test_autocast_switches_graphs() -> None:
    split = autosplit.split(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    assert split(x).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert split(x).dtype is torch.bfloat16
    assert split(x).dtype is torch.float32
    assert len(split.functions) == 2


# --- numbers that a forward reads from data, and that its backward needs --------------------------


FORWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times": lambda x, n: x * n.item(),
    "narrow": lambda x, n: torch.narrow(x, 0, n, 2),
    "roll": lambda x, n: x.roll(int(n.item())) * x,
    "slice": lambda x, n: (x[int(n.item()) :] ** 2).sum(),
}


def reading(name: str) -> nn.Module:
    return layered(lambda m, x, n: FORWARDS[name](m.linear(x), n))


def batch(*numbers: float) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(5, 4, requires_grad=True), torch.tensor(n)) for n in numbers]


@pytest.mark.parametrize("name", FORWARDS)
def test_integer(name: str) -> None:
    split = assert_equals_autograd(reading(name), batch(3, 1, 2), fullgraph=True)
    assert len(split.functions) == 1


def test_float() -> None:
    split = assert_equals_autograd(reading("times"), batch(3.5, -1.25), fullgraph=True)
    assert len(split.functions) == 1


def test_compiled() -> None:
    def close(what: str, ours: Any, theirs: Any) -> None:
        torch.testing.assert_close(ours, theirs, msg=what)

    model = reading("roll")
    assert_equals_autograd(model, batch(3, 1), backend="inductor", compare=close)
