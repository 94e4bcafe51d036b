"""multiplier_search: the division that the memory setting asks for, and no cheaper one."""

from __future__ import annotations

import pytest
from torch import fx

from autosplit.passes import Kind, memory_setting
from autosplit.passes.analysis.aliasing import distinct_bytes
from autosplit.passes.errors import PassError
from autosplit.passes.graph import Regions
from autosplit.passes.memory_policy import Memory
from autosplit.passes.partition.multiplier_search import (
    best_division,
)
from autosplit.passes.partition.reachability import Reachability
from tests.passes.sized import Sized

SIZES = (400, 300, 200, 100)


def layers() -> fx.Graph:
    """A weight gradient for each size, made of an input and a derivative of that size. All take
    about the same time, so that what frees the most bytes is computed in I.
    """
    sized = Sized()
    dy = sized.tangent(8)
    for size in SIZES:
        x = sized.costly(size, sized.input(8))
        sized.result(Kind.OUTPUT, x)
        derivative = sized.costly(8, dy)
        sized.result(Kind.INPUT_GRAD, derivative)
        sized.result(Kind.PARAMETER_GRAD, sized.costly(8, x, derivative))
    return sized.module().graph


def divided(graph: fx.Graph, memory: Memory) -> tuple[Regions, Reachability]:
    reach = Reachability.of(graph)
    return best_division(graph, reach, memory), reach


def deferred(regions: Regions) -> int:
    return distinct_bytes(regions.deferred)


def test_all_weight_gradients_are_deferred_where_nothing_limits_them() -> None:
    regions, _ = divided(layers(), memory_setting("fast"))
    assert regions.released == set()
    assert deferred(regions) == sum(SIZES) + 8 * len(SIZES)


@pytest.mark.parametrize("budget", [1100, 900, 700, 500, 300, 0])
def test_budget_is_kept_with_as_much_deferred_as_fits(budget: int) -> None:
    """What remains deferred where the largest, the two largest, ... are computed in I."""
    regions, _ = divided(layers(), memory_setting(budget))
    sums = [sum(SIZES[at:]) + 8 * len(SIZES[at:]) for at in range(len(SIZES) + 1)]
    assert deferred(regions) == max(each for each in sums if each <= budget)


def test_budget_below_the_least_possible() -> None:
    """An embedding's W needs what I hands on in any case: here one gradient cannot be released."""
    sized = Sized()
    dy, x = sized.tangent(8), sized.input(8)
    sized.result(Kind.INPUT_GRAD, sized.costly(8, dy))
    saved = sized.costly(64, x)
    sized.result(Kind.OUTPUT, saved)
    sized.result(Kind.PARAMETER_GRAD, sized.view(sized.input(16, Kind.TANGENT)))
    graph = sized.module().graph
    with pytest.raises(
        PassError,
        match=r"memory=3: no division holds so little .*; the least possible is 16 bytes",
    ):
        divided(graph, memory_setting(3))
