"""Lifetimes of what crosses between graphs: at which node of the backward a tensor dies."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autosplit.passes import Kind, SplitGraphs
from autosplit.passes.analysis.aliasing import storage_root
from autosplit.passes.graph import inputs, outputs


def last_uses(graphs: SplitGraphs) -> dict[str, int]:
    """Name of each saved and deferred tensor -> where in I and then W it is last used.

    The numbers only order tensors: a higher one lives longer. What I hands on to W lives until W.
    """
    first, second = graphs.backward_input, graphs.backward_weight
    if first is None or second is None:
        return {}
    late = _last_uses(second.graph, Kind.DEFERRED, len(first.graph.nodes))
    handed: dict[fx.Node, int] = {}
    for role, value in outputs(first.graph, Kind.DEFERRED):
        if isinstance(value, fx.Node):
            root = storage_root(value)
            handed[root] = max(handed.get(root, 0), late.get(role.name, 0))
    early = _last_uses(first.graph, Kind.SAVED, 0, handed)
    return {**late, **early}


def _last_uses(
    graph: fx.Graph, kind: Kind, start: int, handed: Mapping[fx.Node, int] | None = None
) -> dict[str, int]:
    order = {node: at for at, node in enumerate(graph.nodes, start)}
    found = {}
    for role, node in inputs(graph, kind).items():
        users = [order[user] for user in node.users if user.op != "output"]
        found[role.name] = max([start, *users, (handed or {}).get(node, 0)])
    return found
