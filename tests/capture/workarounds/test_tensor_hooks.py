"""Hooks that a forward registers on tensors fire, or are refused with the line that does it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError
from tests.semantics.against_autograd import assert_equals_autograd


class Hooked(nn.Module):
    """Registers a hook that doubles the gradient of what ``place`` says."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        if self.place in ("input", "removed"):
            handle = x.register_hook(doubled)
            if self.place == "removed":
                handle.remove()
        if self.place == "weight":
            self.layer.weight.register_hook(doubled)
        if self.place == "view":
            x = x.view_as(x)
            x.register_hook(doubled)
        y: Tensor = self.layer(x)
        if self.place == "middle":
            y.register_hook(doubled)
        return y.relu()


def doubled(gradient: Tensor) -> Tensor:
    return 2 * gradient


@pytest.mark.parametrize("place", ["input", "weight", "removed", "view", "middle"])
def test_gradients_are_autograds(place: str) -> None:
    batches = [(torch.randn(3, 4, requires_grad=True),) for _ in range(2)]
    assert_equals_autograd(Hooked(place), batches)


@pytest.mark.parametrize("place", ["input", "weight"])
def test_no_graph_holds_a_hook_on_what_the_forward_is_given(place: str) -> None:
    with pytest.raises(CaptureError, match=r"test_tensor_hooks\.py:\d+: .*register_hook"):
        autosplit.split(Hooked(place), (torch.randn(3, 4, requires_grad=True),), fullgraph=True)


@pytest.mark.parametrize("place", ["removed", "view", "middle"])
def test_other_hooks_are_in_the_graph(place: str) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    split = autosplit.split(Hooked(place), (x,), fullgraph=True)
    split(x).sum().backward()
    assert split.pending == 1
