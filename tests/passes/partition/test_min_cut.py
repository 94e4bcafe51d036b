"""Minimum cuts: the cheapest of all, its smallest side, and the refusal where there is none."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.passes import PassError
from autosplit.passes.memory_policy import Price
from autosplit.passes.partition.min_cut import SINK, SOURCE, FlowNetwork, Network

# --- network: the cheapest of all cuts, and the refusal where none is -----------------------------


def built(edges: dict[tuple[int, int], int | None]) -> Network:
    network = Network()
    for (tail, head), size in edges.items():
        network.add(tail, head, None if size is None else Price(size))
    return network


def cost(edges: dict[tuple[int, int], int | None], early: set[int]) -> float:
    cut = [size for (tail, head), size in edges.items() if tail in early and head not in early]
    return float("inf") if None in cut else sum(size for size in cut if size is not None)


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


# --- FlowNetwork: what is reached is the smallest side of a minimum cut, as networkx finds it -----


SIZE = 7
START, END = 0, SIZE - 1
ENDS = st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE - 1)).filter(lambda e: e[0] != e[1])


def smallest_side(edges: dict[tuple[int, int], int]) -> set[int]:
    network: nx.DiGraph[int] = nx.DiGraph()
    network.add_nodes_from(range(SIZE))
    network.add_edges_from((*ends, {"capacity": capacity}) for ends, capacity in edges.items())
    residual = nx.algorithms.flow.preflow_push(network, START, END)
    room = [
        (tail, head)
        for tail, head, edge in residual.edges(data=True)
        if edge["flow"] < edge["capacity"]
    ]
    return {START} | nx.descendants(nx.DiGraph([(START, START), *room]), START)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(ENDS, st.integers(0, 12), max_size=20))
def test_the_side_is_the_smallest_of_a_minimum_cut(edges: dict[tuple[int, int], int]) -> None:
    network = FlowNetwork(SIZE, edges)
    for factor in (1, 3):  # one network, several capacities
        scaled = {ends: factor * capacity for ends, capacity in edges.items()}
        found = network.reached([*scaled.values()], START, END)
        assert found == smallest_side(scaled)


def test_a_path_longer_than_pythons_stack() -> None:
    count = 20_000
    network = FlowNetwork(count, [(at, at + 1) for at in range(count - 1)])
    capacities = [5] * (count - 1)
    capacities[count // 2] = 3
    assert len(network.reached(capacities, 0, count - 1)) == count // 2 + 1
