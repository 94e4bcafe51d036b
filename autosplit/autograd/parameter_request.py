"""Backwards that ask for gradients of parameters: noticed, and refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from autosplit.errors import SplitError

T = TypeVar("T")

_SOME = 4


def sample(found: Sequence[T]) -> list[T]:
    """Those parameters, or what stands for them, that a split graph is tied to in autograd's graph
    though it hands them nothing, so that a backward that asks for them is noticed: each costs the
    engine a visit.
    """
    return [*found] if len(found) <= 2 * _SOME else [*found[:_SOME], *found[-_SOME:]]


def refuse_asking() -> None:
    """A backward asks for gradients of parameters, which are not made there.

    Raises:
        SplitError: always.
    """
    raise SplitError(
        "torch.autograd.grad or backward(inputs=...) asks for gradients of parameters of a split "
        "module, which are not computed in it. Call loss.backward() and read .grad, or ask with "
        "a loss of the unsplit model, .model of the split one, which has the same parameters"
    )
