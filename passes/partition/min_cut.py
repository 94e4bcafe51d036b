"""Minimum cuts of networks in which most edges must never be cut.

An edge from ``a`` to ``b`` is cut if ``a`` is on the source's side and ``b`` on the sink's. Edges
without a price must not be cut: the capacity of each exceeds the sum of all prices.

The cut is found as a maximum flow, by Dinitz's algorithm on lists of integers. One joint graph is
cut about a dozen times, with different weights of the prices. The network is built once and only
capacities change. Its shortest paths have few different lengths, so few phases suffice. With
networkx, whose edges are dictionaries, the cuts took a second, which was half of the time of
capture. They take fifteen milliseconds here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from ..errors import InfiniteCutError
from ..memory_policy import Price

SOURCE, SINK = 0, 1
FIRST = 2
"""The least number of another node."""


class Network:
    """A flow network whose nodes are numbers: ``SOURCE``, ``SINK``, and numbers from ``FIRST`` on.
    An edge has a price, or None for unlimited capacity.
    """

    def __init__(self) -> None:
        self._prices: dict[tuple[int, int], Price | None] = {}

    def add_edge(self, tail: int, head: int, price: Price | None = None) -> None:
        """Add an edge; prices of parallel edges are added."""
        _add(self._prices, (tail, head), price)

    def minimum_cut(self, weigh: Callable[[Price], float]) -> tuple[set[int], Price]:
        """The smallest source side of a minimum cut, and the cut's price. No edge may be added
        after the first cut.

        Raises:
            InfiniteCutError: edges without a price lead from the source to the sink.
        """
        prices = self._free_prices
        weights = [None if price is None else round(weigh(price)) for price in prices.values()]
        unlimited = 1 + sum(capacity for capacity in weights if capacity is not None)
        capacities = [unlimited if capacity is None else capacity for capacity in weights]
        side = self._flow.reached(capacities, SOURCE, SINK)
        total = Price()
        for (tail, head), price in prices.items():
            if price is not None and tail in side and head not in side:
                total += price
        return side | self._early, total

    @cached_property
    def _early(self) -> set[int]:
        """The nodes to which edges without a price lead from the source, and the source: they are
        on its side of every cut.

        Raises:
            InfiniteCutError: the sink is among them.
        """
        heads: dict[int, list[int]] = defaultdict(list)
        for (tail, head), price in self._prices.items():
            if price is None:
                heads[tail].append(head)
        parents = _search(SOURCE, heads)
        if SINK not in parents:
            return {*parents}
        path = [SINK]
        while path[-1] != SOURCE:
            path.append(parents[path[-1]])
        raise InfiniteCutError(path[::-1])

    @cached_property
    def _late(self) -> set[int]:
        """The nodes from which edges without a price lead to the sink, and the sink."""
        tails: dict[int, list[int]] = defaultdict(list)
        for (tail, head), price in self._prices.items():
            if price is None:
                tails[head].append(tail)
        return {*_search(SINK, tails)}

    @cached_property
    def _free_prices(self) -> dict[tuple[int, int], Price | None]:
        """The edges of the network in which the source stands for all nodes that are on its side of
        every cut, and the sink for all nodes on its own side.
        """
        early, late = self._early, self._late
        merged: dict[tuple[int, int], Price | None] = {}
        for (tail, head), price in self._prices.items():
            if tail in late or head in early:
                continue  # no cut has its tail on the source's side and its head on the other
            ends = (SOURCE if tail in early else tail, SINK if head in late else head)
            _add(merged, ends, price)
        return merged

    @cached_property
    def _flow(self) -> FlowNetwork:
        """The network without prices."""
        size = 1 + max(map(max, self._free_prices), default=SINK)
        return FlowNetwork(size, self._free_prices)


def _add(
    prices: dict[tuple[int, int], Price | None], ends: tuple[int, int], price: Price | None
) -> None:
    if ends in prices:
        present = prices[ends]
        price = None if present is None or price is None else present + price
    prices[ends] = price


def _search(start: int, neighbours: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Breadth-first search: each reached node, with the node from which it was reached."""
    parents = {start: start}
    queue = [start]
    for node in queue:
        for neighbour in neighbours.get(node, ()):
            if neighbour not in parents:
                parents[neighbour] = node
                queue.append(neighbour)
    return parents


class FlowNetwork:
    """A network over ``range(size)``. An edge has the number ``2n``, its reverse ``2n + 1``.

    Args:
        size: number of nodes.
        ends: tail and head of every edge.
    """

    def __init__(self, size: int, ends: Iterable[tuple[int, int]]) -> None:
        self._leaving: list[list[int]] = [[] for _ in range(size)]
        self._head: list[int] = []
        for tail, head in ends:
            for one, other in ((tail, head), (head, tail)):
                self._leaving[one].append(len(self._head))
                self._head.append(other)

    def reached(self, capacities: Sequence[int], source: int, sink: int) -> set[int]:
        """The smallest source side of a minimum cut: the nodes that a maximum flow leaves
        reachable.

        Args:
            capacities: the capacity of each edge, in the order of ``ends``.
            source: the source node.
            sink: the sink node.
        """
        free = [0] * len(self._head)
        free[::2] = capacities
        while distance := self._distances(free, source, sink):
            self._block(free, distance, source, sink)
        side, stack = {source}, [source]
        while stack:
            for edge in self._leaving[stack.pop()]:
                if free[edge] and self._head[edge] not in side:
                    side.add(self._head[edge])
                    stack.append(self._head[edge])
        return side

    def _distances(self, free: list[int], source: int, sink: int) -> list[int]:
        """For each node, the number of edges with free capacity from it to the sink. Nodes farther
        away than the source may be missing. Empty if the source cannot reach the sink.
        """
        leaving, heads = self._leaving, self._head
        distances = [-1] * len(leaving)
        distances[sink] = 0
        queue = [sink]
        for node in queue:
            further = distances[node] + 1
            for edge in leaving[node]:
                tail = heads[edge]
                if distances[tail] < 0 and free[edge ^ 1]:
                    distances[tail] = further
                    if tail == source:
                        return distances
                    queue.append(tail)
        return []

    def _block(self, free: list[int], distance: list[int], source: int, sink: int) -> None:
        """Send flow along shortest paths until each has a saturated edge."""
        leaving, heads = self._leaving, self._head
        tried = [0] * len(leaving)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                node = self._send(free, path)
                continue
            edges, nearer = leaving[node], distance[node] - 1
            for at in range(tried[node], len(edges)):
                edge = edges[at]
                if free[edge] and distance[heads[edge]] == nearer:
                    tried[node] = at
                    path.append(edge)
                    node = heads[edge]
                    break
            else:
                if node == source:
                    return
                distance[node] = -1
                node = heads[path.pop() ^ 1]

    def _send(self, free: list[int], path: list[int]) -> int:
        """Saturate a path, cut it off before its first full edge, and return its new last node."""
        amount = min([free[edge] for edge in path])
        for edge in path:
            free[edge] -= amount
            free[edge ^ 1] += amount
        full = next(at for at, edge in enumerate(path) if not free[edge])
        node = self._head[path[full] ^ 1]
        del path[full:]
        return node
