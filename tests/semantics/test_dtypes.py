"""Autocast, other precisions, complex numbers, memory formats."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from semantics.against_autograd import assert_equals_autograd, both_modes
from torch import Tensor, nn

import autosplit


def mlp(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 4, dtype=dtype))


@both_modes
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128],
    ids=str,
)
def test_precisions(dtype: torch.dtype, training: bool) -> None:
    batch = [(torch.randn(3, 4, dtype=dtype).requires_grad_(),) for _ in range(2)]
    assert_equals_autograd(mlp(dtype).train(training), batch)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.fft(self.linear(x))
        return torch.fft.rfft(self.linear(x)), spectrum.conj() * torch.fft.fft(x)


@both_modes
def test_real_to_complex_and_conjugates(training: bool) -> None:
    batch = [(torch.randn(3, 4).requires_grad_(),) for _ in range(2)]
    assert_equals_autograd(Spectrum().train(training), batch)


@both_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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


@both_modes
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_autocast_around_the_module(inside: bool, training: bool) -> None:
    model = Mixed().train(training)
    plain = copy.deepcopy(model)
    split = autosplit.split(model)
    batches = [torch.randn(5, 4) for _ in range(2)]
    outputs = []
    for module in (split, plain):
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = module(batch)
                if inside:
                    output.float().square().mean().backward()
            if not inside:
                output.float().square().mean().backward()
            outputs.append(output)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        split.backward_weight()
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == theirs.grad.dtype == torch.float32
        # Autograd would cast once more where backward() itself is under autocast.
        tolerance = 2.0**-5 if inside else 0.0
        error = (mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert error <= tolerance, f"{name}: off by {error}"


def test_autocast_switches_graphs() -> None:
    split = autosplit.split(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    assert split(x).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert split(x).dtype is torch.bfloat16
    assert split(x).dtype is torch.float32
    assert len(split.functions) == 2
