"""Outputs from which the module computes others: hooks and retain_grad() on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import SplitError


class Both(nn.Module):
    """Returns a hidden value and what is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        return self.second(hidden.tanh()), hidden


class InParts(Both):
    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        torch._dynamo.graph_break()
        return result[0] * 2, result[1]


FACES = {
    "whole": lambda: autosplit.split(Both(), fullgraph=True),
    "in parts": lambda: autosplit.split(InParts()),
    "torch.compile": lambda: torch.compile(Both(), backend="autosplit"),
}


@pytest.mark.parametrize(
    ("face", "ask"),
    [
        ("whole", "retain_grad"),
        ("whole", "register_hook"),
        ("in parts", "register_hook"),
        ("torch.compile", "retain_grad"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is split in")
def test_a_hook_on_a_partial_gradient_is_refused(face: str, ask: str) -> None:
    split = FACES[face]()
    y, hidden = split(torch.randn(2, 3))
    hidden.retain_grad() if ask == "retain_grad" else hidden.register_hook(lambda grad: None)
    with pytest.raises(SplitError, match=r"output\[1\]|has a hook or retain_grad") as raised:
        y.sum().backward()
    assert (".unsplit" in str(raised.value)) == (face != "torch.compile")


@pytest.mark.parametrize("face", FACES)
@pytest.mark.filterwarnings("ignore:.*is split in")
def test_a_gradient_that_is_whole_is_had(face: str) -> None:
    y, hidden = FACES[face]()(torch.randn(2, 3))
    y.retain_grad()
    (y.sum() + hidden.sum()).backward()
    assert torch.equal(y.grad, torch.ones(2, 3))
