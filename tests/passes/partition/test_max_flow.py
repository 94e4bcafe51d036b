"""FlowNetwork: what is reached is the smallest side of a minimum cut, as networkx finds it."""

from __future__ import annotations

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.passes.partition.min_cut import FlowNetwork

SIZE = 7
SOURCE, SINK = 0, SIZE - 1
ENDS = st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE - 1)).filter(lambda e: e[0] != e[1])


def smallest_side(edges: dict[tuple[int, int], int]) -> set[int]:
    network: nx.DiGraph[int] = nx.DiGraph()
    network.add_nodes_from(range(SIZE))
    network.add_edges_from((*ends, {"capacity": capacity}) for ends, capacity in edges.items())
    residual = nx.algorithms.flow.preflow_push(network, SOURCE, SINK)
    room = [
        (tail, head)
        for tail, head, edge in residual.edges(data=True)
        if edge["flow"] < edge["capacity"]
    ]
    return {SOURCE} | nx.descendants(nx.DiGraph([(SOURCE, SOURCE), *room]), SOURCE)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(ENDS, st.integers(0, 12), max_size=20))
def test_the_side_is_the_smallest_of_a_minimum_cut(edges: dict[tuple[int, int], int]) -> None:
    network = FlowNetwork(SIZE, edges)
    for factor in (1, 3):  # one network, several capacities
        scaled = {ends: factor * capacity for ends, capacity in edges.items()}
        found = network.reached([*scaled.values()], SOURCE, SINK)
        assert found == smallest_side(scaled)


def test_flow_is_taken_back_from_an_edge() -> None:
    """The first path found goes through the middle, which leaves each half of the rest unused."""
    ends = [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3)]
    assert FlowNetwork(4, ends).reached([1, 1, 1, 1, 1], 0, 3) == {0}
    assert FlowNetwork(4, ends).reached([2, 1, 1, 1, 1], 0, 3) == {0, 1, 2}


def test_a_path_longer_than_pythons_stack() -> None:
    count = 20_000
    network = FlowNetwork(count, [(at, at + 1) for at in range(count - 1)])
    capacities = [5] * (count - 1)
    capacities[count // 2] = 3
    assert len(network.reached(capacities, 0, count - 1)) == count // 2 + 1
