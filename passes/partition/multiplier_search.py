"""The memory setting -> the weights at which the joint graph is divided.

A division at fixed weights is a minimum cut. A limit (on time spent twice, on bytes held, on
work that need not wait) is met by the cut at the right weight: the more something weighs, the
less of it the cut has, and what frees the most bytes for it stays longest. This is the
Lagrangian relaxation of the problem with that limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import fx

from ..analysis.aliasing import distinct_bytes
from ..analysis.operator_cost import duration, flops
from ..errors import BudgetError
from ..graph import Regions, ancestors, calls
from ..memory_policy import Memory, Price
from .reachability import Reachability
from .regions import Division

_STEPS = 24

# In bytes for the time of moving one byte: pointwise work that is done again for less frees
# hardly anything, and for more would free more than it touches.
_RATES = (2.0**-8, 8.0)
# In bytes for one FLOP of a weight gradient that does not wait: one of [m, n] over b rows has
# 2bmn, and frees at most 8b(m + n) bytes.
_ALL_WAIT = 16.0


# Of a price: what is not weighed, and what is.
Parts = Callable[[Price], tuple[float, float]]


def best_division(graph: fx.Graph, reach: Reachability, memory: Memory) -> Regions:
    """Divide a joint graph as the setting asks.

    Raises:
        PassError: the graph cannot be divided.
        BudgetError: a budget cannot be met; names the least possible.
    """
    division = Division(
        graph, reach, recompute=memory.recompute > 0, release=memory.releases_weights
    )
    limit = memory.recompute * sum(map(duration, calls(graph)))
    rate = 0.0
    if memory.recompute:
        rate, regions, _ = _search(
            lambda rate: division.cut(rate, _ALL_WAIT),
            _RATES,
            lambda price: (price.bytes + _ALL_WAIT * price.flops, price.time),
            lambda regions: recompute_time(regions, reach) <= limit,
        )
    if not memory.releases_weights:
        return regions if memory.recompute else division.cut()

    def at(charge: float) -> Regions:
        return division.cut(rate, charge)

    def parts(price: Price) -> tuple[float, float]:
        return price.bytes + rate * price.time, price.flops

    if memory.budget is not None:
        return _meet_budget(memory.budget, at, parts)
    return _search(
        at,
        (0.0, _ALL_WAIT),
        parts,
        lambda regions: waiting_share(regions, reach) >= memory.waiting,
    )[1]


def recompute_time(regions: Regions, reach: Reachability) -> float:
    """Estimated time of everything that runs more often than it must."""
    return sum(
        (count - 1 - (node in reach.recomputed)) * duration(node)
        for node, count in run_counts(regions, reach).items()
        if count > 1
    )


def run_counts(regions: Regions, reach: Reachability) -> Counter[fx.Node]:
    """How often F, I and W together run each node."""
    forward = reach.forward | ancestors(regions.saved)
    return Counter([*forward, *regions.input.runs, *regions.weight.runs])


def weight_work(reach: Reachability) -> set[fx.Node]:
    """What only weight gradients need, all of which may wait."""
    return ancestors(reach.weight_grads) & reach.gradient - reach.urgent


def waiting_share(regions: Regions, reach: Reachability) -> float:
    """What share of the weight gradients' floating-point operations W does."""
    work = weight_work(reach)
    total = sum(map(flops, work))
    return sum(map(flops, work & regions.weight.runs)) / total if total else 1.0


def _meet_budget(budget: int, at: Callable[[float], Regions], parts: Parts) -> Regions:
    """The division that lets the most work wait while I hands over no more than the budget."""

    def exceeds(regions: Regions) -> bool:
        return distinct_bytes(regions.deferred) > budget

    least = distinct_bytes(at(0.0).deferred)
    if least > budget:
        raise BudgetError(
            f"memory={budget}: no division holds so little between I and W; the least possible "
            f"is {least} bytes for one microbatch"
        )
    _, most, within = _search(at, (0.0, _ALL_WAIT), parts, exceeds)
    return within if exceeds(most) else most


def _search(
    cut: Callable[[float], Regions],
    weights: tuple[float, float],
    parts: Parts,
    holds: Callable[[Regions], bool],
) -> tuple[float, Regions, Regions]:
    """The least weight at which something holds that holds from some weight on, the division
    there, and the one at the next lesser weight, where it does not.

    At one weight two divisions cost the same. Either another is cheaper there and lies between
    them, or they are neighbours: how the breakpoints of a parametric minimum cut are found
    (Eisner and Severance, Journal of the ACM 23, 1976).
    """
    low, high = weights
    below, above = cut(low), cut(high)
    if holds(below):
        return low, below, below
    for _ in range(_STEPS):
        (rest_below, more), (rest_above, fewer) = parts(below.price), parts(above.price)
        if more <= fewer or not holds(above):
            break
        weight = (rest_above - rest_below) / (more - fewer)
        between = cut(weight)
        if between.price in (below.price, above.price):
            break
        if holds(between):
            high, above = weight, between
        else:
            below = between
    return high, above, below
