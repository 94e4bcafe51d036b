"""What an optimizer keeps, before and behind its first step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autosplit.torch_internals.state import state_bytes


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        torch.optim.Adagrad,
    ],
)
def test_the_first_step_makes_what_was_foretold(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    model = nn.Linear(300, 20)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = make([*model.parameters()])
    called: list[object] = []
    optimizer.register_step_pre_hook(lambda *args: called.append(args))
    foretold = state_bytes(optimizer)
    assert not called
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert state_bytes(optimizer) == foretold


def test_nothing_is_known_of_an_optimizer_that_fails() -> None:
    assert state_bytes(None) == 0
    assert state_bytes(torch.optim.SparseAdam([nn.Parameter(torch.zeros(3))])) == 0
