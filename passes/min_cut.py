"""The cheapest set of values to carry from one graph to the next.

Both boundaries are the same problem: nodes of one graph are divided into an early and a
late side; what the late side reads must be carried over, at the price of the storage it
keeps alive, unless the late side can recompute it from something else that is carried. The
minimum is a minimum cut (as in Chen et al., arXiv 1604.06174 made exact by max-flow; torch's
own partitioner uses the same reduction): a node is an edge from its "in" to its "out" half
with the carrying price as capacity, and using a value is an edge of unlimited capacity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import networkx as nx
from torch import fx

from .aliasing import is_free, storage_bytes, storage_root
from .errors import PassError
from .graph import is_state, tensor_of
from .sizes import is_size

# Network nodes are numbers: hashes of strings differ from run to run and with them the order
# in which equal cuts are found. Node i of the graph has the halves 2i ("in") and 2i + 1 ("out").
_SOURCE = -1
_SINK = -2

_SIZE_BYTES = 8  # of an integer that crosses


@dataclasses.dataclass(frozen=True)
class Boundary:
    """``carried``: values that cross, in graph order. ``late``: nodes the late side computes."""

    carried: list[fx.Node]
    late: set[fx.Node]


def min_cut(
    graph: fx.Graph,
    *,
    early: set[fx.Node],
    late: set[fx.Node],
    wanted: Iterable[fx.Node],
    redone: Collection[fx.Node] = (),
) -> Boundary:
    """Divide ``graph`` at least cost.

    Args:
        graph: the graph to divide.
        early: nodes that the early side computes and the late side must not recompute.
        late: nodes that the late side computes.
        wanted: nodes whose values must be available on the late side.
        redone: nodes that the late side computes again rather than being handed their value.

    Nodes neither early nor late go wherever fewer bytes cross. Only what is redone and what
    costs nothing (views, constants) may end up on both sides.

    Raises:
        PassError: a late node needs a value that can neither be carried nor recomputed.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    network = _network(order, early, late, wanted, redone)
    network.add_nodes_from((_SOURCE, _SINK))
    try:
        residual = nx.algorithms.flow.preflow_push(network, _SOURCE, _SINK)
    except nx.NetworkXUnbounded as error:
        raise PassError(
            "the late side needs a value that can neither be carried nor recomputed"
        ) from error
    reached = _reached(residual)
    cut = {node for node, at in order.items() if 2 * at in reached and 2 * at + 1 not in reached}
    return _boundary(cut, wanted, order)


def _reached(residual: nx.DiGraph[int]) -> set[int]:
    """The smallest early side among all minimum cuts: what the source still reaches."""
    found = {_SOURCE}
    stack = [_SOURCE]
    while stack:
        for target, edge in residual[stack.pop()].items():
            if target not in found and edge["flow"] < edge["capacity"]:
                found.add(target)
                stack.append(target)
    return found


def _network(
    order: dict[fx.Node, int],
    early: set[fx.Node],
    late: set[fx.Node],
    wanted: Iterable[fx.Node],
    redone: Collection[fx.Node],
) -> nx.DiGraph[int]:
    """The flow network over the late side's needs; nodes nobody late needs are left out."""
    network: nx.DiGraph[int] = nx.DiGraph()
    stack: list[fx.Node] = []
    for node in wanted:
        network.add_edge(2 * order[node] + 1, _SINK)
        stack.append(node)
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        index = order[node]
        if node in late:
            network.add_edge(2 * index, _SINK)
            network.add_edge(2 * index, 2 * index + 1)
        else:
            capacity = {} if node in redone else _capacity(node)
            network.add_edge(2 * index, 2 * index + 1, **capacity)
        if node in early:
            network.add_edge(_SOURCE, 2 * index)
            continue
        for parent in node.all_input_nodes:
            network.add_edge(2 * order[parent] + 1, 2 * index)
            operand = storage_root(parent)
            if not any(is_free(each) or each in redone for each in (node, operand)):
                # Computing a node early needs its operands early too. Without this edge an
                # operand could be put on both sides and run twice.
                network.add_edge(2 * index, 2 * order[operand])
            stack.append(parent)
    return network


def _capacity(node: fx.Node) -> dict[str, int]:
    """Bytes that carrying a node's value costs; no capacity where it cannot be carried.

    Parameters and buffers cost nothing: the module keeps them alive anyway. A view costs a
    byte more than what it looks at, so that the thing itself crosses and the view is redone.
    """
    if is_size(node):
        return {"capacity": _SIZE_BYTES}
    if tensor_of(node) is None:
        return {}
    root = storage_root(node)
    price = 0 if is_state(root) else storage_bytes(root)
    return {"capacity": price if node is root else price + 1}


def _boundary(cut: set[fx.Node], wanted: Iterable[fx.Node], order: dict[fx.Node, int]) -> Boundary:
    """Walk back from what is wanted to the cut. A cut node that the walk does not meet costs
    nothing (a parameter) and is wanted by nobody: it is not carried.
    """
    carried: set[fx.Node] = set()
    late: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in cut:
            carried.add(node)
        elif node not in late:
            late.add(node)
            stack.extend(node.all_input_nodes)
    return Boundary(sorted(carried, key=order.__getitem__), late)
