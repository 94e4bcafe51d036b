"""The tensors that cross from one graph to the next, and their bytes of distinct storage."""

from __future__ import annotations

import dataclasses

from torch import fx

from ..graph import (
    Kind,
    SplitGraphs,
    computed_outputs,
    descendants,
    inputs,
    outputs,
    source_line,
    value_text,
)
from .aliasing import storage_bytes, storage_root


@dataclasses.dataclass(frozen=True)
class BoundaryTensor:
    """A saved or deferred tensor.

    Attributes:
        name: such as layers_4_norm_output, see ``passes/partition/split_graphs.py``.
        shape: dtype and shape.
        bytes: bytes of the storage that the tensor keeps alive; 0 if an earlier tensor in the list
            shares it.
        source: the user's line that computed it, or an empty string.
        consumers: the results that the next graph computes from it.
    """

    name: str
    shape: str
    bytes: int
    source: str
    consumers: tuple[str, ...]


def boundary_tensors(
    giver: fx.GraphModule, taker: fx.GraphModule, kind: Kind
) -> list[BoundaryTensor]:
    """The tensors of a kind that the graph ``giver`` returns and the graph ``taker`` reads."""
    inputs_of_taker = {role.name: node for role, node in inputs(taker.graph, kind).items()}
    results = computed_outputs(taker.graph)
    counted: set[fx.Node] = set()
    rows = []
    for role, value in outputs(giver.graph, kind):
        root = storage_root(value)
        size = 0 if root in counted else storage_bytes(root)
        counted.add(root)
        reached = descendants([inputs_of_taker[role.name]])
        consumers = tuple(r.name for r, v in results if v in reached and r.kind is not kind)
        shape = value_text(value.meta["val"])
        rows.append(BoundaryTensor(role.name, shape, size, source_line(value), consumers))
    return rows


def boundaries(graphs: SplitGraphs) -> dict[Kind, list[BoundaryTensor]]:
    """The tensors that F saves for the backward (SAVED), and the tensors that I defers to W
    (DEFERRED). Empty for graphs without a backward.
    """
    if graphs.backward is None or graphs.backward_input is None or graphs.backward_weight is None:
        return {}
    return {
        Kind.SAVED: boundary_tensors(graphs.forward, graphs.backward, Kind.SAVED),
        Kind.DEFERRED: boundary_tensors(
            graphs.backward_input, graphs.backward_weight, Kind.DEFERRED
        ),
    }


def total_bytes(rows: list[BoundaryTensor]) -> int:
    """Bytes of distinct storage on the boundary."""
    return sum(row.bytes for row in rows)
