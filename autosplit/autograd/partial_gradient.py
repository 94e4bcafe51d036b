"""Outputs that other outputs are computed from: to autograd, the gradient that arrives at one from
outside of the module is all that it has.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import has_hooks_of_users

Watched = list[tuple[str, "weakref.ref[Tensor]"]]


def watch(named: Iterable[tuple[str, Tensor]]) -> Watched:
    """Outputs whose gradient would be a part, to be checked when a backward comes by."""
    return [(name, weakref.ref(tensor)) for name, tensor in named]


def refuse_partial(watched: Watched) -> None:
    """Check that nobody asks for the gradient of an output that is read inside.

    Raises:
        SplitError: there is a hook on one, or it is to retain its gradient.
    """
    for name, reference in watched:
        tensor = reference()
        if tensor is None or not (tensor.retains_grad or has_hooks_of_users(tensor)):
            continue
        raise SplitError(
            f"{name} has a hook or retain_grad(), and the module computes other outputs from it, "
            "whose gradients do not pass there: it would get a part of its gradient. Take the "
            "gradient in the unsplit model (.unsplit), or split the module before and behind this "
            "value apart"
        )
