"""network: the cheapest of all cuts, and the refusal where none is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.passes import PassError
from autosplit.passes.memory_policy import Price
from autosplit.passes.partition.min_cut import SINK, SOURCE, Network


def built(edges: dict[tuple[int, int], int | None]) -> Network:
    network = Network()
    for (tail, head), size in edges.items():
        network.add(tail, head, None if size is None else Price(size))
    return network


def cost(edges: dict[tuple[int, int], int | None], early: set[int]) -> float:
    cut = [size for (tail, head), size in edges.items() if tail in early and head not in early]
    return float("inf") if None in cut else sum(size for size in cut if size is not None)


def test_the_narrowest_edge_is_cut() -> None:
    edges = {(SOURCE, 0): 9, (0, 1): 2, (1, SINK): 5}
    assert built(edges).cut(lambda price: price.bytes)[0] == {SOURCE, 0}


def test_parallel_edges_add_up() -> None:
    network = built({(SOURCE, 0): 3, (0, SINK): 4})
    network.add(SOURCE, 0, Price(2))
    assert network.cut(lambda price: price.bytes)[0] == {SOURCE, 0}


def test_weights_decide_between_currencies() -> None:
    network = Network()
    network.add(SOURCE, 0, Price(bytes=10))
    network.add(0, SINK, Price(time=4))
    assert network.cut(lambda price: price.bytes + 2 * price.time)[0] == {SOURCE, 0}
    assert network.cut(lambda price: price.bytes + 3 * price.time)[0] == {SOURCE}


def test_no_cut() -> None:
    network = built({(SOURCE, 0): None, (0, 1): None, (1, SINK): None})
    with pytest.raises(PassError, match="no cut: the source is tied to the sink"):
        network.cut(lambda price: price.bytes)


NODES = range(5)
PAIRS = [
    (tail, head)
    for tail, head in itertools.product([SOURCE, *NODES], [*NODES, SINK])
    if tail != head
]


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(PAIRS), st.none() | st.integers(0, 9), max_size=14))
def test_least_of_all_cuts(edges: dict[tuple[int, int], int | None]) -> None:
    sides = [
        {SOURCE, *chosen}
        for count in range(len(NODES) + 1)
        for chosen in itertools.combinations(NODES, count)
    ]
    least = min(cost(edges, side) for side in sides)
    if least == float("inf"):
        with pytest.raises(PassError, match="no cut"):
            built(edges).cut(lambda price: price.bytes)
    else:
        early, price = built(edges).cut(lambda price: price.bytes)
        assert cost(edges, early) == price.bytes == least
