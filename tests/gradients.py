"""Gradients of two models that were trained alike."""

from __future__ import annotations

import torch
from torch import nn


def assert_same_gradients(model: nn.Module, plain: nn.Module, *, exact: bool = True) -> None:
    """Parameter by parameter, in their order: bit for bit unless told; none where there is none."""
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is None or theirs.grad is None:
            continue
        if exact:
            assert torch.equal(mine.grad, theirs.grad), name
        else:
            torch.testing.assert_close(mine.grad, theirs.grad)
