"""``Part``: one graph that Dynamo found, as reports tell of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import fx

from autosplit.passes import SplitGraphs
from autosplit.passes.analysis.operator_cost import weight_flops
from autosplit.passes.graph import outputs, source_line
from autosplit.runtime.functions import SplitFunctions


class Part:
    """One graph of a model, compiled.

    Attributes:
        parameters: names of the parameters that need a gradient. Where modules share code,
            they share the graph; the names are those of the first.
        functions: F, I and W; None where the graph was not split.
        reason: why it was not; empty where it was.
        lines: ``file.py:3-9`` for the user's lines that the graph holds.
    """

    def __init__(self, module: fx.GraphModule, parameters: Sequence[str]) -> None:
        self.parameters = tuple(parameters)
        self.functions: SplitFunctions | None = None
        self.reason = ""
        self.lines = _lines(module.graph)

    @property
    def graphs(self) -> SplitGraphs | None:
        """The split graphs; None where the graph has no backward or was not split."""
        functions = self.functions
        return None if functions is None or not functions.has_backward else functions.graphs

    @property
    def is_split(self) -> bool:
        """Whether there is a W."""
        weight = None if self.graphs is None else self.graphs.backward_weight
        return weight is not None and bool(outputs(weight.graph))

    @property
    def state(self) -> str:
        """``split``, or why not."""
        if self.is_split or self.reason:
            return self.reason or "split"
        return "no backward" if self.graphs is None else "no parameters"

    @property
    def weight_flops(self) -> tuple[int, int]:
        """Floating-point operations of weight gradients in W, and in I all the same."""
        return (0, 0) if self.graphs is None else weight_flops(self.graphs)


def _lines(graph: fx.Graph) -> str:
    """The user's lines behind the graph, file by file."""
    found: dict[str, set[int]] = {}
    for node in graph.nodes:
        place = source_line(node).partition(" ")[0]
        path, _, number = place.rpartition(":")
        if path and number.isdigit():
            found.setdefault(os.path.basename(path), set()).add(int(number))
    return ", ".join(f"{name}:{_span(numbers)}" for name, numbers in found.items())


def _span(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"
