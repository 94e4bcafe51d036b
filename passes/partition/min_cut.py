"""Minimum cuts of networks in which most edges must never be cut.

An edge from ``a`` to ``b`` is paid for when ``a`` ends on the source's side and ``b`` on the
sink's. Edges without a price cannot be paid for at all. Such edges are what a graph of
operators mainly consists of, so the network is shrunk by them before the flow is computed:
whatever they tie to the source, to the sink or to each other is one node.

Maximum flow by Dinitz's algorithm, on lists of integers.

One joint graph is cut at about a dozen weights of the currencies, and with networkx, which has
every edge in dictionaries, these cuts took longer than all other passes together. Here the network
is laid out once and only capacities change; its shortest paths have few lengths, so few phases do.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence

import networkx as nx

from autosplit.passes.errors import PassError
from autosplit.passes.memory_policy import Price


class FlowNetwork:
    """A network over ``range(size)``. An edge has the number ``2n``, its reverse ``2n + 1``.

    Args:
        size: how many nodes.
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
        """The nodes to which more could flow when as much as possible flows to the sink: the
        source's side of the minimum cut that has the fewest nodes there.

        Args:
            capacities: of the edges, in the order of ``ends``.
            source: where flow comes from.
            sink: where it goes.
        """
        free = [0] * len(self._head)
        free[::2] = capacities
        while distance := self._distances(free, source, sink):
            self._block(free, distance, source, sink)
        found, stack = {source}, [source]
        while stack:
            for edge in self._leaving[stack.pop()]:
                if free[edge] and self._head[edge] not in found:
                    found.add(self._head[edge])
                    stack.append(self._head[edge])
        return found

    def _distances(self, free: list[int], source: int, sink: int) -> list[int]:
        """Of every node nearer to the sink than the source is, and of the source: how many edges
        with room lead there. Nothing where the source has no way.
        """
        leaving, heads = self._leaving, self._head
        found = [-1] * len(leaving)
        found[sink] = 0
        queue = [sink]
        for node in queue:
            further = found[node] + 1
            for edge in leaving[node]:
                tail = heads[edge]
                if found[tail] < 0 and free[edge ^ 1]:
                    found[tail] = further
                    if tail == source:
                        return found
                    queue.append(tail)
        return []

    def _block(self, free: list[int], distance: list[int], source: int, sink: int) -> None:
        """Send flow along shortest paths until each has a full edge."""
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
        """Fill a path and cut it off at its first full edge; returns the node in front of that."""
        amount = min([free[edge] for edge in path])
        for edge in path:
            free[edge] -= amount
            free[edge ^ 1] += amount
        full = next(at for at, edge in enumerate(path) if not free[edge])
        node = self._head[path[full] ^ 1]
        del path[full:]
        return node


SOURCE = -1
SINK = -2


Edges = dict[int, dict[int, Price | None]]


class Network:
    """A flow network over integers, with edges of a price or (None) of unlimited capacity."""

    def __init__(self) -> None:
        self._edges: Edges = {SOURCE: {}, SINK: {}}

    def add(self, tail: int, head: int, price: Price | None = None) -> None:
        """Add an edge; parallel edges add up."""
        heads = self._edges.setdefault(tail, {})
        self._edges.setdefault(head, {})
        _merge(heads, head, price)

    def contract(self) -> ContractedNetwork:
        """Contract edges of unlimited capacity: the same cuts over fewer nodes.

        Raises:
            PassError: edges without a price lead from the source to the sink.
        """
        first = _reach(self._edges, SOURCE)
        last = _reach(_reversed(self._edges), SINK)
        if SINK in first:
            raise PassError("no cut: the source is tied to the sink")
        names = dict.fromkeys(first, SOURCE) | dict.fromkeys(last, SINK)
        edges = _renamed(self._edges, names)
        names = _compose(names, _cycles(edges), self._edges)
        edges = _renamed(edges, names)
        return ContractedNetwork(*_contract_ties(edges, names))


class ContractedNetwork:
    """A contracted network, to be cut at different weights of the currencies."""

    def __init__(self, edges: Edges, names: dict[int, int]) -> None:
        self._names = names
        self._places = {node: place for place, node in enumerate(edges)}
        self._ends = [
            (self._places[tail], self._places[head]) for tail in edges for head in edges[tail]
        ]
        self._prices = [price for heads in edges.values() for price in heads.values()]
        self._flow = FlowNetwork(len(edges), self._ends)

    def cut(self, weigh: Callable[[Price], float]) -> tuple[set[int], Price]:
        """The source's side of a minimum cut, the smallest among all, and the cut's price."""
        known = [None if price is None else round(weigh(price)) for price in self._prices]
        unlimited = 1 + sum(capacity for capacity in known if capacity is not None)
        capacities = [unlimited if capacity is None else capacity for capacity in known]
        reached = self._flow.reached(capacities, self._places[SOURCE], self._places[SINK])
        cut_edges = [
            price
            for (tail, head), price in zip(self._ends, self._prices, strict=True)
            if price is not None and tail in reached and head not in reached
        ]
        side = {node for node, name in self._names.items() if self._places[name] in reached}
        return side, sum(cut_edges, Price())


def _merge(heads: dict[int, Price | None], head: int, price: Price | None) -> None:
    if head not in heads:
        heads[head] = price
        return
    known = heads[head]
    heads[head] = None if known is None or price is None else known + price


def _reversed(edges: Edges) -> Edges:
    backward: Edges = {node: {} for node in edges}
    for tail, heads in edges.items():
        for head, price in heads.items():
            backward[head][tail] = price
    return backward


def _reach(edges: Edges, start: int) -> set[int]:
    """Nodes reached over edges without a price."""
    found = {start}
    stack = [start]
    while stack:
        for head, price in edges[stack.pop()].items():
            if price is None and head not in found:
                found.add(head)
                stack.append(head)
    return found


def _renamed(edges: Edges, names: dict[int, int]) -> Edges:
    """The network with nodes merged; edges that can never be cut or never cost are gone."""
    merged: Edges = {SOURCE: {}, SINK: {}}
    for node in edges:
        merged.setdefault(names.get(node, node), {})
    for tail, heads in edges.items():
        new_tail = names.get(tail, tail)
        for head, price in heads.items():
            new_head = names.get(head, head)
            if new_tail not in (SINK, new_head) and new_head != SOURCE:
                _merge(merged[new_tail], new_head, price)
    return merged


def _cycles(edges: Edges) -> dict[int, int]:
    """Nodes on a common cycle of edges without a price -> one of them."""
    tied: nx.DiGraph[int] = nx.DiGraph()
    for tail, heads in edges.items():
        tied.add_edges_from((tail, head) for head, price in heads.items() if price is None)
    names: dict[int, int] = {}
    for component in nx.strongly_connected_components(tied):
        first = min(component)
        names.update((node, first) for node in component if node != first)
    return names


def _compose(names: dict[int, int], more: dict[int, int], nodes: Iterable[int]) -> dict[int, int]:
    found = {node: names.get(node, node) for node in nodes}
    return {node: more.get(name, name) for node, name in found.items()}


def _contract_ties(edges: Edges, names: dict[int, int]) -> tuple[Edges, dict[int, int]]:
    """Merge each node whose only edge out, or only edge in, has no price with its neighbour.

    If only one edge leads out of a node and must not be cut, putting the node on its head's
    side never costs more; the same holds for an only edge in and its tail's side.
    """
    into = _reversed(edges)
    merged: dict[int, int] = {}
    queue = collections.deque(sorted(edges))
    while queue:
        node = queue.popleft()
        if node in (SOURCE, SINK) or node in merged:
            continue
        target = _only_tie(edges[node])
        target = _only_tie(into[node]) if target is None else target
        if target is None:
            continue
        merged[node] = target
        _move(edges, into, node, target)
        queue.extend({target, *edges[target], *into[target]})
    final = {node: _follow(merged, name) for node, name in names.items()}
    return edges, final


def _only_tie(neighbours: dict[int, Price | None]) -> int | None:
    if len(neighbours) != 1:
        return None
    ((node, price),) = neighbours.items()
    return node if price is None else None


def _move(edges: Edges, into: Edges, node: int, target: int) -> None:
    """Give all edges of ``node`` to ``target``."""
    for head, price in edges.pop(node).items():
        del into[head][node]
        _join(edges, into, target, head, price)
    for tail, price in into.pop(node).items():
        del edges[tail][node]
        _join(edges, into, tail, target, price)


def _join(edges: Edges, into: Edges, tail: int, head: int, price: Price | None) -> None:
    if tail not in (SINK, head) and head != SOURCE:
        _merge(edges[tail], head, price)
        into[head][tail] = edges[tail][head]


def _follow(merged: dict[int, int], name: int) -> int:
    while name in merged:
        name = merged[name]
    return name
