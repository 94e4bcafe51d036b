"""Weight gradients that I computes while it waits for collectives.

Between the start of a collective and the first reader of its result a rank has nothing to do for
the input gradients, but for W of this microbatch, as far as it depends on nothing later. What fits
into such waits, by the rates that are known or estimated, costs no time there and is not to be done
afterwards.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from ..analysis.aliasing import storage_root
from ..analysis.collective_order import CollectiveScheduler, OperatorTimes
from ..analysis.collectives import is_start
from ..graph import Regions, ancestors
from ..memory_policy import Rates
from .reachability import Reachability
from .regions import with_released

_MOST = 0.5  # of a weight gradient's work that fits into waits


def hide_collectives(
    graph: fx.Graph, reach: Reachability, regions: Regions, rates: Rates | None = None
) -> Regions:
    """The division with weight gradients in I that fill its waits; itself where there are none.

    Args:
        graph: the joint graph.
        reach: what its nodes are needed for.
        regions: its division.
        rates: of operators and collectives; None: they are estimated.
    """
    if not any(map(is_start, regions.input.runs)):
        return regions
    nodes = [n for n in graph.nodes if n in regions.backward.runs and n.op == "call_function"]
    costs = OperatorTimes.at(rates)
    hidden = CollectiveScheduler(nodes, costs).order(1.0, hold=True).hidden_in
    hiding = {node for node, wait in hidden.items() if wait in regions.input.runs}
    work = _work(reach, regions)
    more = {
        root
        for root, needed in work.items()
        if sum(map(costs.operator, needed & hiding)) >= _MOST * sum(map(costs.operator, needed)) > 0
    }
    wanted = {node for node in reach.weight_grads if storage_root(node) in more}
    return with_released(graph, reach, regions, wanted) if wanted else regions


def _work(reach: Reachability, regions: Regions) -> dict[fx.Node, set[fx.Node]]:
    """What allocates a weight gradient that I could make -> what only W would run for it."""
    late = regions.weight.runs - regions.input.runs
    found: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in reach.weight_grads:
        root = storage_root(node)
        if root in reach.releasable and node not in regions.released:
            found[root] |= ancestors([node]) & late
    return found
