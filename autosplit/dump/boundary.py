"""The boundary between two graphs, tensor by tensor."""

from __future__ import annotations

import dataclasses

from torch import fx

from autosplit.passes.analysis.aliasing import storage_bytes, storage_root
from autosplit.passes.graph import Kind, descendants, inputs, outputs, source_line
from autosplit.passes.lowering.codegen import value_text


@dataclasses.dataclass(frozen=True)
class BoundaryTensor:
    """A saved or deferred tensor.

    Attributes:
        name: module and use, see ``passes/partition/forward_backward.py``.
        shape: dtype and shape.
        bytes: storage it keeps alive; 0 where a tensor above it in the table counts it.
        source: the user's line that made it, or an empty string.
        consumers: what the next graph computes from it.
    """

    name: str
    shape: str
    bytes: int
    source: str
    consumers: tuple[str, ...]


def boundary_tensors(
    giver: fx.GraphModule, taker: fx.GraphModule, kind: Kind
) -> list[BoundaryTensor]:
    """Every tensor of the given kind that ``giver`` returns and ``taker`` takes."""
    taken = {role.name: node for role, node in inputs(taker.graph, kind).items()}
    results = [(role, value) for role, value in outputs(taker.graph) if isinstance(value, fx.Node)]
    counted: set[fx.Node] = set()
    rows = []
    for role, value in outputs(giver.graph, kind):
        root = storage_root(value)
        size = 0 if root in counted else storage_bytes(root)
        counted.add(root)
        reached = descendants([taken[role.name]])
        consumers = tuple(r.name for r, v in results if v in reached and r.kind is not kind)
        shape = value_text(value.meta["val"])
        rows.append(BoundaryTensor(role.name, shape, size, source_line(value), consumers))
    return rows


def total_bytes(rows: list[BoundaryTensor]) -> int:
    """Bytes of distinct storage on the boundary."""
    return sum(row.bytes for row in rows)
