"""Weights that are computed from other parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.utils.parametrizations as p
from torch import nn
from torch.nn.utils import parametrize

from tests.semantics.against_autograd import assert_equals_autograd, both_modes

CASES: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: p.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: nn.Sequential(p.spectral_norm(nn.Linear(4, 4)), nn.ReLU()),
    "orthogonal": lambda: p.orthogonal(nn.Linear(4, 4)),
}


@both_modes
@pytest.mark.parametrize("name", CASES)
def test_equals_autograd(name: str, training: bool) -> None:
    batch = [(torch.randn(3, 4).requires_grad_(),) for _ in range(2)]
    assert_equals_autograd(CASES[name]().train(training), batch)


def test_registered_and_removed_after_the_capture() -> None:
    batch = [(torch.randn(3, 4).requires_grad_(),) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 4))
    assert_equals_autograd(model, batch)
    p.weight_norm(model[0])
    assert_equals_autograd(model, batch)
    parametrize.remove_parametrizations(model[0], "weight")
    assert_equals_autograd(model, batch)
