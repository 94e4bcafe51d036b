"""Calls of a compiled graph, and the leaves that replace its parameters.

At each call the graph gets, in place of a parameter whose gradient is deferred, a leaf that
shares its data. Autograd then knows nothing of the parameter until its gradient is there: no
hook fires early, no reducer counts it. The leaf remembers the call, and with it the
parameter, until the graph's backward runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

_CALL = "_autosplit_call"


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a graph.

    Attributes:
        parameters: index of the graph's input -> parameter.
        token: what the owner gave when the graph was entered.
        batch: indices of other inputs that no earlier operator computed.
        absent: outputs that the backward brings no gradient for, by name.
    """

    parameters: dict[int, nn.Parameter]
    token: Any
    batch: frozenset[int] = frozenset()
    absent: frozenset[str] = frozenset()

    def leaf(self, index: int) -> Tensor:
        """A leaf that the graph gets in place of a parameter."""
        leaf = self.parameters[index].detach().requires_grad_()
        setattr(leaf, _CALL, (self, index))
        return leaf


def call_of(leaf: Tensor | None) -> tuple[Call, int] | None:
    """The call that a leaf was made for, and its index among the graph's inputs; None for other
    tensors.
    """
    found: tuple[Call, int] | None = getattr(leaf, _CALL, None)
    return found
