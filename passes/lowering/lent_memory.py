"""What crosses from I to W and lies in memory of whoever calls: inputs, and incoming gradients."""

from __future__ import annotations

from torch import fx

from ..analysis.aliasing import storage_root
from ..graph import Kind, Role, SplitGraphs, inputs, outputs, role_of


def lent(graphs: SplitGraphs) -> dict[Role, Role]:
    """What W takes from I -> the input, or the tangent, in whose storage it lies.

    Storage that the graphs allocate, and that of parameters and buffers, is left out.
    """
    if graphs.backward_input is None:
        return {}
    lenders = _lenders(graphs.forward.graph, Kind.SAVED)
    found = {}
    for role, root in _roots(graphs.backward_input.graph, Kind.DEFERRED).items():
        lender = lenders.get(root, root)
        if lender.kind in {Kind.INPUT, Kind.TANGENT}:
            found[role] = lender
    return found


def _lenders(forward: fx.Graph, kind: Kind) -> dict[Role, Role]:
    """What F leaves -> the input in whose storage it lies."""
    taken = inputs(forward, Kind.INPUT)
    return {role: root for role, root in _roots(forward, kind).items() if root in taken}


def _roots(graph: fx.Graph, kind: Kind) -> dict[Role, Role]:
    """Results of a kind -> what the graph takes in whose storage they lie."""
    pairs = [(role, value) for role, value in outputs(graph, kind) if isinstance(value, fx.Node)]
    roots = [(role, storage_root(value)) for role, value in pairs]
    return {role: role_of(root) for role, root in roots if root.op == "placeholder"}
