"""Dead-code elimination that keeps random operators where eager would draw.

Random operators stay in the joint graph and in forward: without one, all that is drawn later
would differ from eager's. Each runs once, in forward; a copy left in a backward graph would
draw a second time and must go. Un-functionalised mutations are kept: they are effects.
"""

from __future__ import annotations

from torch import fx

from ..analysis.operators import is_effect, is_random
from ..graph import SplitProgram

_DRAWING = ("joint", "forward")


def dead_code(program: SplitProgram) -> bool:
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
