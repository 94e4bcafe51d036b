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
from ..analysis.collective_order import CollectiveScheduler, OperatorTimes, exposed_time
from ..analysis.collectives import is_start
from ..graph import Region, Regions, ancestors
from ..memory_policy import Rates
from .reachability import Reachability
from .regions import with_released

_MOST = 0.5  # of a weight gradient's work that fits into waits

# Where rates are known, that much of waits is filled beforehand, the least first, until I waits by
# no more than a share of its collectives longer than it has to.
_FILLS = (1.0, 1.25, 1.5)
_TOLERANCE = 0.05


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
    costs, work = OperatorTimes.at(rates), _work(reach, regions)
    scheduler = CollectiveScheduler(_operators(graph, regions.backward), costs)

    def divided(fill: float) -> Regions:
        hidden = scheduler.order(fill, hold=True, pack=rates is not None).hidden_in
        hiding = {node for node, wait in hidden.items() if wait in regions.input.runs}
        more = {
            root
            for root, needed in work.items()
            if sum(map(costs.operator, needed & hiding))
            >= _MOST * sum(map(costs.operator, needed))
            > 0
        }
        wanted = {node for node in reach.weight_grads if storage_root(node) in more}
        return with_released(graph, reach, regions, wanted) if wanted else regions

    if rates is None:
        return divided(1.0)
    tried = [divided(fill) for fill in _FILLS]
    exposed = [
        _exposed(_operators(graph, each.input), costs, fill)
        for each, fill in zip(tried, _FILLS, strict=True)
    ]
    exchanges = sum(map(costs.exchange, filter(is_start, regions.input.runs)))
    enough = min(exposed) + _TOLERANCE * exchanges
    return next(each for each, time in zip(tried, exposed, strict=True) if time <= enough)


def _operators(graph: fx.Graph, region: Region) -> list[fx.Node]:
    return [node for node in graph.nodes if node in region.runs and node.op == "call_function"]


def _exposed(nodes: list[fx.Node], costs: OperatorTimes, fill: float) -> float:
    """Time for which I is left waiting, in the best of a few orders."""
    scheduler = CollectiveScheduler(nodes, costs)
    orders = (
        scheduler.order(each, hold=True, pack=pack).nodes
        for each in {1.0, fill}
        for pack in (True, False)
    )
    return min(exposed_time(order, costs=costs) for order in orders)


def _work(reach: Reachability, regions: Regions) -> dict[fx.Node, set[fx.Node]]:
    """What allocates a weight gradient that I could make -> what only W would run for it."""
    late = regions.weight.runs - regions.input.runs
    found: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in reach.weight_grads:
        root = storage_root(node)
        if root in reach.releasable and node not in regions.released:
            found[root] |= ancestors([node]) & late
    return found
