"""Random operators: same numbers as autograd for the same seed, drawn once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError, SplitError
from tests.semantics.against_autograd import assert_equals_autograd, both_modes, within


class Noisy(nn.Module):
    def __init__(self, make: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return self.make(self, x)


def stochastic_depth(module: Any, x: Tensor) -> Tensor:
    keep = torch.empty(x.shape[0], 1).bernoulli_(0.5) / 0.5
    return x + module.linear(x) * keep


def attention(module: Any, x: Tensor) -> Tensor:
    q = module.linear(x).unsqueeze(0)
    p = 0.5 if module.training else 0.0
    return F.scaled_dot_product_attention(q, q, x.unsqueeze(0), dropout_p=p)


def unread(module: Any, x: Tensor) -> Tensor:
    """What nobody reads is drawn all the same: the mask comes after it."""
    torch.rand(3)
    h = module.linear(x)
    F.dropout(h, 0.5, module.training)
    return F.dropout(h, 0.5, module.training)


CASES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout 0.3": lambda m, x: F.dropout(m.linear(x), 0.3, m.training),
    "dropout 0.5": lambda m, x: F.dropout(m.linear(x), 0.5, m.training),
    "alpha dropout": lambda m, x: F.alpha_dropout(m.linear(x), 0.5, m.training),
    "rrelu": lambda m, x: F.rrelu(m.linear(x), training=m.training),
    "noise": lambda m, x: m.linear(x) + torch.randn_like(x),
    "gumbel softmax": lambda m, x: F.gumbel_softmax(m.linear(x), hard=True),
    "multinomial": lambda m, x: m.linear(x)[torch.multinomial(torch.ones(20), 5)],
    "permutation": lambda m, x: m.linear(x)[torch.randperm(20)],
    "stochastic depth": stochastic_depth,
    "attention dropout": attention,
    "unread": unread,
}


@both_modes
@pytest.mark.parametrize("name", CASES)
def test_equals_autograd(name: str, training: bool) -> None:
    model = Noisy(CASES[name]).train(training)
    assert_equals_autograd(model, [(torch.randn(20, 4).requires_grad_(),) for _ in range(3)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_rounds_its_noise(dtype: torch.dtype) -> None:
    """1 / (1 - 0.1) is no number of half precision."""
    model = Noisy(lambda m, x: F.dropout(m.linear(x), 0.1, m.training)).to(dtype)
    assert_equals_autograd(model, [(torch.randn(20, 4, dtype=dtype).requires_grad_(),)] * 2)


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand(4)


# Dynamo makes an instance to trace the context.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@both_modes
@pytest.mark.parametrize("last", [True, False], ids=["last", "before a dropout"])
def test_custom_backward_that_draws(last: bool, training: bool) -> None:
    """Not in the forward: the masks drawn there would be others."""

    def make(module: Any, x: Tensor) -> Tensor:
        h = NoisyGradient.apply(F.dropout(module.linear(x), 0.5, module.training))
        return h if last else F.dropout(h, 0.5, module.training)

    batch = [(torch.randn(20, 4).requires_grad_(),) for _ in range(2)]
    split = assert_equals_autograd(Noisy(make).train(training), batch)
    assert "draws random numbers in the backward" in split.report()
    whole = autosplit.split(Noisy(make), fullgraph=True)
    with pytest.raises(SplitError, match=r"backward \(from .*test_random.py:\d+.*save them for it"):
        whole(*batch[0])


@both_modes
def test_encoder_layer(training: bool) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True).train(training)
    batch = [(torch.randn(2, 5, 8).requires_grad_(),) for _ in range(2)]
    assert_equals_autograd(model, batch, compare=within(1e-5))


PYTHON: dict[str, Callable[[], Any]] = {
    "random.random": random.random,
    "random.randint": lambda: random.randint(1, 100),
    "numpy number": lambda: float(np.random.rand()),
    "numpy array": lambda: torch.from_numpy(np.random.rand(4).astype(np.float32)),
}


@both_modes
@pytest.mark.parametrize("name", PYTHON)
def test_numbers_of_python_and_numpy(name: str, training: bool) -> None:
    """New ones on every call, none of them drawn by the capture, and no graph holds them."""
    draw = PYTHON[name]
    model = Noisy(lambda m, x: m.linear(x) * draw()).train(training)
    assert_equals_autograd(model, [(torch.randn(20, 4).requires_grad_(),) for _ in range(3)])
    with pytest.raises(CaptureError):
        autosplit.split(model, (torch.randn(2, 4),), fullgraph=True)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.generator = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.generator.random()


def test_generator_of_its_own_is_refused() -> None:
    """Plain ``torch.compile`` would multiply by the same number for ever."""
    split = autosplit.split(nn.Sequential(OwnGenerator()))
    with pytest.raises(CaptureError, match=r"keeps a random.Random as '0.generator', whose"):
        split(torch.randn(2, 4))


@pytest.mark.parametrize("draw", [random.random, lambda: float(torch.rand(()))], ids=["py", "t"])
def test_python_branch_on_a_random_number_is_refused(draw: Callable[[], float]) -> None:
    """Drawn once at the capture it would be a constant."""
    model = Noisy(lambda m, x: m.linear(x) if draw() < 0.5 else x)
    split = autosplit.split(model)
    with pytest.raises(CaptureError, match=r"cannot be captured in one graph"):
        split.capture(torch.randn(2, 4))
