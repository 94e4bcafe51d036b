"""``Accumulators``: the tensors into which a graph adds weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

Parts: TypeAlias = "tuple[frozenset[str], ...]"
"""Sets of parameters, each reported when its gradients are complete."""


class CompletionReport(NamedTuple):
    """A function that is called whenever the gradient sums of a set of parameters are complete.

    Attributes:
        parts: sets of parameters.
        function: called with the index of a part; maybe more than once for one part.
    """

    parts: Parts
    function: Callable[[int], None]

    def report_all(self) -> None:
        """Report that all parts are complete."""
        for number in range(len(self.parts)):
            self.function(number)


class Accumulators(NamedTuple):
    """Tensors into which a graph adds gradients.

    Attributes:
        tensors: one for each parameter of the graph, in the graph's order.
        overwrites: whether the gradients are the first of a step, and overwrite memory that is not
            initialized.
        report: if the gradients are the last of a step, the function to report complete parts to;
            else None.
    """

    tensors: Sequence[Tensor]
    overwrites: bool = False
    report: CompletionReport | None = None
