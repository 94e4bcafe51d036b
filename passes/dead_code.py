"""Remove nodes that no output depends on, random ones included.

FX keeps random operators because removing one shifts the generator for all that follow. In
a split program each random operator runs once, in forward; a copy left in a backward graph
would draw a second time and must go. Un-functionalised mutations are kept: they are effects.
"""

from __future__ import annotations

from torch import fx

from .graph import Program
from .ops import is_effect


def dead_code(program: Program) -> bool:
    """Run over every graph of the program; True if anything was removed."""
    removed = [_eliminate(module.graph) for module in program.graphs().values()]
    return any(removed)


def _eliminate(graph: fx.Graph) -> bool:
    return graph.eliminate_dead_code(is_impure_node=_is_kept)


def _is_kept(node: fx.Node) -> bool:
    return node.op in {"placeholder", "output"} or is_effect(node)
