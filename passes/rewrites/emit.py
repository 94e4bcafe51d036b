"""Emit and erase nodes of a graph that a pass rewrites in place, and eliminate dead code.

Random operators stay in the joint graph and in forward: without one, all that is drawn later
would differ from eager's. Each runs once, in forward; a copy left in a backward graph would
draw a second time and must go. Un-functionalised mutations are kept: they are effects.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..analysis.operators import is_effect, is_random
from ..graph import SplitGraphs

_OWN = ("val", "role")  # what a node says of itself alone


def emit(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **options: Any) -> fx.Node:
    """A call where the graph inserts, for the user's line that made ``like``.

    Raises:
        RuntimeError: the operator does not take such tensors.
    """
    with like.meta["val"].fake_mode:
        value = target(*fx.node.map_arg(args, lambda each: each.meta["val"]), **options)
    node = graph.call_function(target, args, options)
    node.meta = {key: each for key, each in like.meta.items() if key not in _OWN}
    node.meta["val"] = value
    return node


def erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erase the nodes without readers, in reverse order of the graph."""
    for node in sorted(nodes, reverse=True):  # nodes compare by their places
        if not node.users:
            graph.erase_node(node)


_DRAWING = ("joint", "forward")


def dead_code(program: SplitGraphs) -> bool:
    """Run over every graph of the program; True if anything was removed."""
    removed = [
        module.graph.eliminate_dead_code(_is_kept_drawing if name in _DRAWING else _is_kept)
        for name, module in program.graphs().items()
    ]
    return any(removed)


def eliminate_dead_code(graph: fx.Graph) -> bool:
    """Eliminate dead code of a backward graph, random operators included; True if there was any."""
    return graph.eliminate_dead_code(_is_kept)


def _is_kept(node: fx.Node) -> bool:
    return node.op in {"placeholder", "output"} or is_effect(node)


def _is_kept_drawing(node: fx.Node) -> bool:
    return _is_kept(node) or is_random(node)
