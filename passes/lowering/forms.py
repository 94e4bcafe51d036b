"""Forms in which graphs are compiled, and the marks that compiling one graph leaves on graphs that
read its results.

forward         read by  backward, backward_input
backward_input  read by  backward_weight
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from ..analysis.aliasing import storage_root
from ..graph import Role, SplitGraphs, computed_outputs, concrete, inputs

Strides = tuple[int | torch.SymInt, ...]
Changed = dict[str, fx.GraphModule]
"""Graphs that a pass changed or created, by the name under which they are verified."""

Fuses = Literal["none", "joined", "all"]
"""Operators of gradients: none, those that run once for several microbatches, or all."""

_READERS = {"forward": ("backward", "backward_input"), "backward_input": ("backward_weight",)}
_DONATED = "donated"


@dataclass(frozen=True)
class GraphForm:
    """The form in which a backend compiles one graph of a program, or all backward graphs of the
    program.

    Attributes:
        graph: the graph's name.
        missing: names of the outputs that have no gradient in this backward.
        dtype: dtype of the accumulators into which the graph adds; None: each gradient's dtype.
        fuses: which operators that compute gradients are replaced by operators that add into the
            accumulators, see ``fuse``.
        count: the number of microbatches that a joined W runs, or the largest number of slices of
            B.
        rows: products with at most this many rows a microbatch run once for all microbatches.
        strides: the strides that the backend chose for results that the next graphs read.
        donated: the saved tensors that the backend may overwrite.
        writes_first: whether the gradients are the first of a step, and overwrite the accumulators.
        reports: sets of parameters; the graph reports when the gradients of a set are complete.
    """

    graph: str = "backward"
    missing: frozenset[str] = frozenset()
    dtype: torch.dtype | None = None
    fuses: Fuses = "none"
    count: int = 1
    rows: int = 0
    strides: Mapping[Role, Strides] = field(default_factory=dict)
    donated: frozenset[Role] = frozenset()
    writes_first: bool = False
    reports: tuple[frozenset[str], ...] = ()


def _readers(program: SplitGraphs, form: GraphForm) -> Changed:
    names = _READERS.get(form.graph, ())
    return {name: module for name, module in program.graphs().items() if name in names}


def propagate_strides(program: SplitGraphs, form: GraphForm) -> Changed:
    """Set the strides that a backend chose for a graph's results on the inputs of the graphs that
    read these results.
    """
    if not form.strides:
        return {}
    readers = _readers(program, form)
    for module in readers.values():
        for role, node in inputs(module.graph).items():
            node.meta["val"] = with_strides(node.meta["val"], form.strides.get(role))
    return readers


def donate(program: SplitGraphs, form: GraphForm) -> Changed:
    """Mark the saved tensors that a compiled backward may overwrite. A graph that returns a saved
    tensor may not overwrite it.
    """
    if not form.donated:
        return {}
    readers = _readers(program, form)
    for module in readers.values():
        returned = {storage_root(node) for _, node in computed_outputs(module.graph)}
        for role, node in inputs(module.graph).items():
            if role in form.donated and node not in returned:
                node.meta[_DONATED] = True
    return readers


def is_donated(node: fx.Node) -> bool:
    """Whether a graph may overwrite this input."""
    return bool(node.meta.get(_DONATED))


def with_strides(value: Any, strides: Strides | None) -> Any:
    """A fake tensor with the strides that a backend chose; the same tensor if it chose none."""
    if strides is None or [*map(concrete, strides)] == [*map(concrete, value.stride())]:
        return value
    return value.new_empty_strided(value.shape, strides)
