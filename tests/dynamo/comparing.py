"""Results of two models, and how to compare them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.dynamo.breaking import loss_of


def train(forward: object, batches: list[Tensor]) -> list[Tensor | None]:
    """Losses and input gradients of a forward and backward over each batch."""
    found: list[Tensor | None] = []
    for batch in batches:
        leaf = batch.clone().requires_grad_()
        loss = loss_of(forward(leaf))  # type: ignore[operator]
        loss.backward()
        found += [loss.detach(), leaf.grad]
    return found


def assert_same(mine: Tensor | None, theirs: Tensor | None, name: str) -> None:
    assert (mine is None) == (theirs is None), f"{name}: {mine} against {theirs}"
    if mine is not None and theirs is not None:
        assert torch.equal(mine, theirs), f"{name}: off by {(mine - theirs).abs().max()}"


def assert_same_state(mine: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert_same(a, b, name)
        assert_same(a.grad, b.grad, f"gradient of {name}")
    for (name, a), b in zip(mine.named_buffers(), theirs.buffers(), strict=True):
        assert_same(a, b, name)
