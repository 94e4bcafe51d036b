"""Operators of the backward between the start of a collective and the wait for it.

Traced, a wait stands right behind its collective. Here the wait moves to the first operator that
needs it, and what depends on nothing that is under way comes before it: first what the next
collective waits for, then weight gradients. Results are the same bit for bit.

Of several orders, made for fills of different size, that is taken which leaves the least time
exposed: at the rates that are known, or by estimates over a range of links, from four times faster
than estimated to sixteen times slower. An order must not hold more than the graph does in its own,
plus the largest collective; I may hold until its end what W would have waited with, had it not been
to compute weight gradients that hide collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import fx

from ..analysis.collective_order import CollectiveScheduler, exposed_time
from ..analysis.operator_cost import value_bytes
from ..analysis.operators import is_start
from ..graph import SplitGraphs, calls, output_node
from ..memory_policy import Rates
from .buffers import LiveBytes

_FILLS = (1.0, 4.0, 0.25, 16.0)
_SCALES = (0.25, 1.0, 4.0, 16.0)
_FILLS_KNOWN = (1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


def overlap_collectives(program: SplitGraphs) -> bool:
    """Reorder I, W and the unsplit backward; True if anything was moved."""
    if not program.memory.overlap:
        return False
    room = {"backward_input": program.hiding}
    backwards = {name: m for name, m in program.graphs().items() if name.startswith("backward")}
    moved = [
        overlap_in_graph(module, program.memory.rates, room.get(name, 0))
        for name, module in backwards.items()
    ]
    return any(moved)


def overlap_in_graph(module: fx.GraphModule, rates: Rates | None = None, room: int = 0) -> bool:
    """Reorder one graph; True if anything was moved.

    Args:
        module: a graph without effects, whose inputs and outputs have roles.
        rates: of operators and collectives; None: they are estimated.
        room: bytes that it may hold besides.
    """
    graph = module.graph
    before = list(calls(graph))
    starts = [node for node in before if is_start(node)]
    if not starts:
        return False
    limit = LiveBytes(module).peak() + max(map(_bytes_under_way, starts)) + room
    least, rest = _exposed(before, rates), list(graph.nodes)
    chosen = before
    for order in _candidates(graph, rates):
        exposed = _exposed(order, rates)
        if exposed < least:
            _arrange(graph, order)
            if LiveBytes(module).peak() <= limit:
                chosen, least = order, exposed
    _arrange(graph, chosen)
    return list(graph.nodes) != rest


def _candidates(graph: fx.Graph, rates: Rates | None) -> Iterator[list[fx.Node]]:
    nodes = [node for node in graph.nodes if node.op not in {"placeholder", "output"}]
    scheduler = CollectiveScheduler(nodes, rates)
    fills, packs = (_FILLS, (False,)) if rates is None else (_FILLS_KNOWN, (True, False))
    for hold, fill, pack in itertools.product((True, False), fills, packs):
        yield scheduler.order(fill, hold=hold, pack=pack).nodes


def _exposed(order: list[fx.Node], rates: Rates | None) -> float:
    """Time exposed, as a share of all exchanges, on average over links."""
    scales = _SCALES if rates is None else (1.0,)
    return sum(exposed_time(order, scale, rates) / scale for scale in scales)


def _arrange(graph: fx.Graph, order: list[fx.Node]) -> None:
    output = output_node(graph)
    for node in order:
        output.prepend(node)


def _bytes_under_way(start: fx.Node) -> int:
    return sum(value_bytes(each.meta.get("val")) for each in (start, *start.all_input_nodes))
