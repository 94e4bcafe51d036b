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


def assert_rounded(model: nn.Module, plain: nn.Module) -> None:
    """The same but for rounding, by their norms."""
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            allowed = 20 * torch.finfo(theirs.dtype).eps * theirs.grad.double().norm()
            assert (mine.grad.double() - theirs.grad.double()).norm() <= allowed, name
