"""Search for the Lagrange multipliers at which the minimum cut meets the memory setting.

At fixed multipliers, the division of a joint graph is a minimum cut. Each constraint (on the time
of recomputation, the bytes between I and W, the share of deferred work) is relaxed: a multiplier
prices its quantity into the cut. A larger multiplier gives a cut with less of that quantity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import fx

from ..analysis.aliasing import distinct_bytes
from ..analysis.operator_cost import duration, flops
from ..errors import PassError
from ..graph import Regions, ancestors, calls
from ..memory_policy import Memory, Price
from .reachability import Reachability
from .regions import Division

_STEPS = 24

# Bytes per time of moving one byte. At lower rates, recomputing pointwise work frees hardly
# anything; at higher rates, it would have to free more than it touches.
RATES = (2.0**-8, 8.0)
# Bytes per FLOP of a weight gradient that I computes. An [m, n] gradient over b rows has 2bmn FLOPs
# and frees at most 8b(m + n) bytes, so at this multiplier all are deferred.
_ALL_WAIT = 16.0


# Splits a price into a constant part and the part that the multiplier weighs.
Parts = Callable[[Price], tuple[float, float]]


def best_division(graph: fx.Graph, reach: Reachability, memory: Memory) -> Regions:
    """The cheapest division of a joint graph that meets the memory setting.

    Raises:
        PassError: the graph cannot be divided, or the budget cannot be met. The error names the
            smallest possible budget.
    """
    division = Division(
        graph, reach, recompute=memory.recompute > 0, release=memory.allows_early_weight_grads
    )
    limit = memory.recompute * sum(map(duration, calls(graph)))
    rate = 0.0
    if memory.recompute:
        rate, regions, _ = _search(
            lambda rate: division.minimum_cut(rate, _ALL_WAIT),
            RATES,
            lambda price: (price.bytes + _ALL_WAIT * price.flops, price.time),
            lambda regions: recompute_time(regions, reach) <= limit,
        )
    if not memory.allows_early_weight_grads:
        return regions if memory.recompute else division.minimum_cut()

    def cut_at(charge: float) -> Regions:
        return division.minimum_cut(rate, charge)

    def weighted_price(price: Price) -> tuple[float, float]:
        return price.bytes + rate * price.time, price.flops

    if memory.budget is not None:
        return _meet_budget(memory.budget, cut_at, weighted_price)
    return _search(
        cut_at,
        (0.0, _ALL_WAIT),
        weighted_price,
        lambda regions: waiting_share(regions, reach) >= memory.waiting,
    )[1]


def recompute_time(regions: Regions, reach: Reachability) -> float:
    """Estimated time of recomputation, without the nodes that the user asked to recompute."""
    return sum(
        (count - 1 - (node in reach.recomputed)) * duration(node)
        for node, count in run_counts(regions, reach).items()
        if count > 1
    )


def run_counts(regions: Regions, reach: Reachability) -> Counter[fx.Node]:
    """The number of graphs among F, I and W that run each node."""
    forward = reach.forward | ancestors(regions.saved)
    return Counter([*forward, *regions.input.runs, *regions.weight.runs])


def waiting_share(regions: Regions, reach: Reachability) -> float:
    """The share of the weight gradients' FLOPs that is deferred to W."""
    # Nodes of the backward that only weight gradients need: all of them may be deferred.
    work = ancestors(reach.weight_grads) & reach.gradient - reach.input_grad_closure
    total = sum(map(flops, work))
    return sum(map(flops, work & regions.weight.runs)) / total if total else 1.0


def _meet_budget(budget: int, at: Callable[[float], Regions], parts: Parts) -> Regions:
    """The division with the most deferred work whose deferred tensors fit the budget, which is in
    bytes.
    """

    def exceeds(regions: Regions) -> bool:
        return distinct_bytes(regions.deferred) > budget

    least = distinct_bytes(at(0.0).deferred)
    if least > budget:
        raise PassError(
            f"memory={budget}: no division keeps so few bytes between I and W; the least possible "
            f"is {least} bytes for one microbatch"
        )
    _, most, within = _search(at, (0.0, _ALL_WAIT), parts, exceeds)
    return within if exceeds(most) else most


def _search(
    cut: Callable[[float], Regions],
    bounds: tuple[float, float],
    parts: Parts,
    satisfies: Callable[[Regions], bool],
) -> tuple[float, Regions, Regions]:
    """Return (multiplier, cut, neighbour): the smallest Lagrange multiplier at which the cut
    satisfies the predicate, the cut, and the next cut at smaller multipliers, which does not
    satisfy it.

    The predicate is monotone in the multiplier. Two cuts bracket the result. The next multiplier to
    try is the one at which both cuts cost the same. If a third cut is cheaper there, it lies
    between the two cuts and replaces one of them. Otherwise the two cuts are neighbours, and the
    search ends. This method finds the breakpoints of a parametric minimum cut (Eisner and
    Severance, Journal of the ACM 23, 1976).
    """
    low, high = bounds
    below = cut(low)
    if satisfies(below):
        return low, below, below
    above = cut(high)
    for _ in range(_STEPS):
        (rest_below, more), (rest_above, fewer) = parts(below.price), parts(above.price)
        if more <= fewer or not satisfies(above):
            break
        multiplier = (rest_above - rest_below) / (more - fewer)
        between = cut(multiplier)
        if between.price in (below.price, above.price):
            break
        if satisfies(between):
            high, above = multiplier, between
        else:
            below = between
    return high, above, below
