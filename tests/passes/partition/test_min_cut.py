"""Minimum cuts: the cheapest of all, its smallest side, and the refusal where there is none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Set

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autosplit.passes.errors import InfiniteCutError
from autosplit.passes.memory_policy import Price
from autosplit.passes.partition import min_cut
from autosplit.passes.partition.min_cut import FIRST, SINK, SOURCE, FlowNetwork, Network

NODES = range(FIRST, FIRST + 6)
A, B, C, D, E, F = NODES


def test_weights_decide_between_currencies() -> None:
    network = Network()
    network.add_edge(SOURCE, A, Price(bytes=10))
    network.add_edge(A, SINK, Price(time=4))
    assert network.minimum_cut(lambda price: price.bytes + 2 * price.time)[0] == {SOURCE, A}
    assert network.minimum_cut(lambda price: price.bytes + 3 * price.time)[0] == {SOURCE}


def test_an_infinite_cut_has_its_shortest_path() -> None:
    network = Network()
    for tail, head in itertools.pairwise([SOURCE, A, B, C, SINK]):
        network.add_edge(tail, head)
    network.add_edge(A, SINK, Price(bytes=10))
    network.add_edge(B, SINK)
    with pytest.raises(InfiniteCutError) as caught:
        network.minimum_cut(lambda price: price.bytes)
    assert caught.value.path == [SOURCE, A, B, SINK]


def test_nodes_whose_side_is_known_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of many equal layers is as large as the few places where it may be cut."""
    sizes: list[int] = []

    def build(size: int, ends: Iterable[tuple[int, int]]) -> FlowNetwork:
        sizes.append(len([*ends]))
        return FlowNetwork(size, ends)

    monkeypatch.setattr(min_cut, "FlowNetwork", build)
    network = Network()
    for tail, head in itertools.pairwise([SOURCE, A, B]):
        network.add_edge(tail, head)
    network.add_edge(B, C, Price(bytes=7))
    network.add_edge(A, C, Price(bytes=2))
    network.add_edge(C, D, Price(bytes=8))
    network.add_edge(D, SINK)
    early, price = network.minimum_cut(lambda price: price.bytes)
    assert (early, price) == ({SOURCE, A, B, C}, Price(bytes=8))
    assert sizes == [2]


PAIRS = [
    (tail, head)
    for tail, head in itertools.product([SOURCE, *NODES], [*NODES, SINK])
    if tail != head
]
SIDES = [
    frozenset((SOURCE, *chosen))
    for count in range(len(NODES) + 1)
    for chosen in itertools.combinations(NODES, count)
]
Edges = list[tuple[tuple[int, int], int | None]]


def cost(edges: Edges, early: Set[int]) -> float:
    cut = [size for (tail, head), size in edges if tail in early and head not in early]
    return math.inf if None in cut else sum(size for size in cut if size is not None)


LONGER = [(SOURCE, C), (C, D), (D, B), (A, E), (E, F), (F, SINK)]
"""Ways that are open once the shortest, over A and B, gives way."""


@settings(max_examples=400, deadline=None)
@example([(ends, 1) for ends in [(SOURCE, A), (A, B), (B, SINK), *LONGER]])
@given(
    st.lists(
        st.tuples(st.sampled_from(PAIRS), st.integers(0, 9) | st.none()), min_size=6, max_size=24
    )
)
def test_the_smallest_side_of_the_cheapest_cut(edges: Edges) -> None:
    """Or the refusal where there is none; parallel edges add up."""
    network = Network()
    for (tail, head), size in edges:
        network.add_edge(tail, head, None if size is None else Price(size))
    costs = {side: cost(edges, side) for side in SIDES}
    least = min(costs.values())
    for factor in (1, 3):  # one network, several weights
        if least == math.inf:
            with pytest.raises(InfiniteCutError, match="no cut"):
                network.minimum_cut(lambda price, factor=factor: factor * price.bytes)
            continue
        early, price = network.minimum_cut(lambda price, factor=factor: factor * price.bytes)
        assert price.bytes == least
        assert early == frozenset.intersection(*(s for s in SIDES if costs[s] == least))


def test_a_path_longer_than_pythons_stack() -> None:
    count = 20_000
    network = FlowNetwork(count, [(at, at + 1) for at in range(count - 1)])
    capacities = [5] * (count - 1)
    capacities[count // 2] = 3
    assert len(network.reached(capacities, 0, count - 1)) == count // 2 + 1
