"""Emit and erase nodes of a graph that a pass rewrites in place, and eliminate dead code.

Random operators are kept in the joint graph and in forward. If one were removed, all later draws
would differ from eager's. Each random operator runs once, in forward. A copy in a backward graph
would draw again, so it is removed. Un-functionalised mutations are effects, and are kept.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..analysis.operators import is_effect, is_random
from ..graph import SplitGraphs

_NODE_KEYS = ("val", "role")  # keys that are not copied from another node


def emit(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **options: Any) -> fx.Node:
    """Insert a call at the graph's insertion point, with the origin of the node ``like``.

    Raises:
        RuntimeError: the operator does not accept these tensors.
    """
    with like.meta["val"].fake_mode:
        value = target(*fx.node.map_arg(args, lambda operand: operand.meta["val"]), **options)
    node = graph.call_function(target, args, options)
    node.meta = {key: value for key, value in like.meta.items() if key not in _NODE_KEYS}
    node.meta["val"] = value
    return node


def erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erase the nodes of a list that have no readers, in reverse order of the graph."""
    for node in sorted(nodes, reverse=True):  # nodes compare by position
        if not node.users:
            graph.erase_node(node)


_DRAWING = ("joint", "forward")


def dead_code(program: SplitGraphs) -> bool:
    """Eliminate dead code in every graph of the program; True if a node was removed."""
    removed = [
        module.graph.eliminate_dead_code(_is_kept_drawing if name in _DRAWING else _is_kept)
        for name, module in program.graphs().items()
    ]
    return any(removed)


def eliminate_dead_code(graph: fx.Graph) -> bool:
    """Eliminate dead code in a backward graph, random operators included; True if a node was
    removed.
    """
    return graph.eliminate_dead_code(_is_kept)


def _is_kept(node: fx.Node) -> bool:
    return node.op in {"placeholder", "output"} or is_effect(node)


def _is_kept_drawing(node: fx.Node) -> bool:
    return _is_kept(node) or is_random(node)
