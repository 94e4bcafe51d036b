"""The memory setting -> the weights at which the joint graph is divided.

A division at fixed weights is a minimum cut. A limit (on time spent twice, on bytes held, on
work that need not wait) is met by the cut at the right weight: the more something weighs, the
less of it the cut has, and what frees the most bytes for it stays longest. So each limit is a
bisection: the Lagrangian relaxation of the problem with that limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import fx

from .aliasing import distinct_bytes
from .cost import duration, flops
from .errors import BudgetError
from .graph import Regions, ancestors, calls
from .memory import Memory
from .reach import Reach
from .regions import Division

_STEPS = 13

# Powers of two between which weights are sought. In bytes for the time of moving one byte:
# pointwise work that is done again for more would free more than it touches.
_RATES = (-8.0, 3.0)
# In bytes for one FLOP of a weight gradient that does not wait: one of [m, n] over b rows has
# 2bmn, and frees at most 8b(m + n) bytes.
_CHARGES = (-24.0, 4.0)
_ALL_WAIT = 2.0 ** _CHARGES[1]


def choose(graph: fx.Graph, reach: Reach, memory: Memory) -> Regions:
    """Divide a joint graph as the setting asks.

    Raises:
        PassError: the graph cannot be divided.
        BudgetError: a budget cannot be met; names the least possible.
    """
    division = Division(graph, reach, again=memory.recompute > 0, release=memory.releases_weights)
    limit = memory.recompute * sum(map(duration, calls(graph)))
    rate = 0.0
    if memory.recompute:
        rate, _ = _search(
            _RATES, lambda rate: time_again(division.cut(rate, _ALL_WAIT), reach) <= limit
        )
    if not memory.releases_weights:
        return division.cut(rate)
    if memory.budget is None:
        charge, _ = _search(
            _CHARGES,
            lambda charge: waiting_share(division.cut(rate, charge), reach) >= memory.waiting,
        )
        return division.cut(rate, charge)
    return _within(memory.budget, division, rate)


def time_again(regions: Regions, reach: Reach) -> float:
    """Estimated time of everything that runs more often than it must."""
    return sum(
        (count - 1 - (node in reach.redone)) * duration(node)
        for node, count in runs(regions, reach).items()
        if count > 1
    )


def runs(regions: Regions, reach: Reach) -> Counter[fx.Node]:
    """How often F, I and W together run each node."""
    forward = reach.forward | ancestors(regions.saved)
    return Counter([*forward, *regions.input.runs, *regions.weight.runs])


def weight_work(reach: Reach) -> set[fx.Node]:
    """What only weight gradients need, all of which may wait."""
    return ancestors(reach.weight_grads) & reach.gradient - reach.urgent


def waiting_share(regions: Regions, reach: Reach) -> float:
    """What share of the weight gradients' floating-point operations W does."""
    work = weight_work(reach)
    total = sum(map(flops, work))
    return sum(map(flops, work & regions.weight.runs)) / total if total else 1.0


def _within(budget: int, division: Division, rate: float) -> Regions:
    """The division that lets the most work wait while I hands over no more than the budget."""

    def held(charge: float) -> int:
        return distinct_bytes(division.cut(rate, charge).deferred)

    if held(_ALL_WAIT) <= budget:
        return division.cut(rate, _ALL_WAIT)
    least = held(0.0)
    if least > budget:
        raise BudgetError(
            f"memory={budget}: no division holds so little between I and W; the least possible "
            f"is {least} bytes for one microbatch"
        )
    _, charge = _search(_CHARGES, lambda charge: held(charge) > budget)
    return division.cut(rate, charge)


def _search(powers: tuple[float, float], holds: Callable[[float], bool]) -> tuple[float, float]:
    """The least weight found at which something holds that holds above some weight, and the
    greatest found at which it does not: 0 where it always holds.
    """
    low, high = powers
    if holds(2.0**low):
        return 2.0**low, 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(2.0**middle) else (middle, high)
    return 2.0**high, 2.0**low
