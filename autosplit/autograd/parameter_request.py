"""Detection and refusal of ``torch.autograd.grad`` for a split module's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from autosplit.errors import SplitError

T = TypeVar("T")

_SOME = 4


def probe_sample(found: Sequence[T]) -> list[T]:
    """The parameters, or leaves in their place, that a split graph has edges to in autograd's graph
    though it gives them no gradients, so that a backward that asks for them is noticed: each costs
    the engine a visit.
    """
    return [*found] if len(found) <= 2 * _SOME else [*found[:_SOME], *found[-_SOME:]]


def refuse_parameter_request() -> None:
    """Refuse a backward that asks for gradients of parameters.

    Raises:
        SplitError: always.
    """
    raise SplitError(
        "torch.autograd.grad or backward(inputs=...) asks for gradients of parameters of a split "
        "module, which are not computed in it. Call loss.backward() and read .grad, or ask with "
        "a loss of the unsplit model, .unsplit of the split one, which has the same parameters"
    )
