"""Slice W into graphs of near-equal FLOPs, which run in order with other work between them.

A pause in a pipeline may be shorter than a whole W, and the first gradients can be reduced
over ranks while later ones are computed. The order of W's operators is cut, so that what one
slice computes and a later one reads is computed once and handed on, and results are the same
bit for bit.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate as running_sums

from torch import fx

from ..analysis.aliasing import is_free
from ..analysis.operator_cost import flops
from ..errors import SliceCountError
from ..graph import SUBGRAPH, Kind, Role, calls, is_size, outputs, placeholders, role_of
from ..partition.extract import extract
from ..partition.regions import walk
from ..subgraph import inline, inner_calls, subgraphs

_CALLS = 2  # of other graphs in a slice; with fewer, slices would differ too much


def slice_weight_graph(module: fx.GraphModule, count: int) -> list[fx.GraphModule]:
    """W as ``count`` graphs, each with some of the gradients.

    A slice takes, besides parameters and buffers, deferred tensors of W and of earlier slices,
    and returns what later slices read under the role deferred.

    Raises:
        PassError: there are fewer matrix products and convolutions than slices.
    """
    costs = _costs(module.graph)
    if len(costs) < _CALLS * count and subgraphs(module.graph):
        module = inline(module)
        costs = _costs(module.graph)
    place = _places(module.graph, costs, count)
    gradients: list[list[tuple[Role, fx.Node]]] = [[] for _ in range(count)]
    for role, value in outputs(module.graph):
        made = _made_from([value])
        gradients[max((place[node] for node in made if node in place), default=0)].append(
            (role, value)
        )
    handed: list[list[tuple[Role, fx.Node]]] = [[] for _ in range(count)]
    for node, made_in in place.items():
        if max(_readers(node, place), default=made_in) > made_in:
            handed[made_in].append((Role(Kind.DEFERRED, node.name), node))
    return [
        _slice(module, place, index, [*gradients[index], *handed[index]]) for index in range(count)
    ]


def _slice(
    module: fx.GraphModule,
    place: dict[fx.Node, int],
    index: int,
    returns: list[tuple[Role, fx.Node]],
) -> fx.GraphModule:
    taken = set(placeholders(module.graph))
    there = taken.union(node for node, made_in in place.items() if made_in < index)
    compute, carried = walk([value for _, value in returns], there)
    incoming = [
        (role_of(node) if node in taken else Role(Kind.DEFERRED, node.name), node)
        for node in sorted(carried)  # by their places
    ]
    return extract(
        module, f"backward_weight_{index}", carried=incoming, compute=compute, returns=returns
    )


def _places(graph: fx.Graph, costs: Mapping[fx.Node, int], count: int) -> dict[fx.Node, int]:
    """Slice of every node that does work. Views are recomputed wherever they are read."""
    work = [node for node in calls(graph) if not _is_redone(node)]
    if not 1 <= count <= max(len(costs), 1):
        raise SliceCountError(len(costs), count)
    first = [list(costs)[at] for at in _cuts(list(costs.values()), count)]
    place: dict[fx.Node, int] = {}
    index = 0
    for node in work:
        index += node in first
        # A tuple is never handed on: its items are taken where it is made.
        place[node] = place.get(node.args[0], index) if _is_item(node) else index  # type: ignore[arg-type]
    _wait_for_readers(graph, place, costs)
    return place


def _costs(graph: fx.Graph) -> dict[fx.Node, int]:
    """FLOPs of what has any: of an operator, or of all in the graph that a node calls."""
    called = {each: sum(map(flops, inner_calls(each.module.graph))) for each in subgraphs(graph)}
    found = (
        (n, called[n.meta[SUBGRAPH]] if SUBGRAPH in n.meta else flops(n)) for n in calls(graph)
    )
    return {node: cost for node, cost in found if cost}


def _cuts(costs: Sequence[int], count: int) -> list[int]:
    """Where to begin the second and later parts, so that each ends near its share of the sum."""
    before = [0, *running_sums(costs)]
    cuts: list[int] = []
    for part in range(1, count):
        share = before[-1] * part / count
        low, high = (cuts[-1] if cuts else 0) + 1, len(costs) - (count - part)
        cuts.append(min(range(low, high + 1), key=lambda at: abs(before[at] - share)))
    return cuts


def _wait_for_readers(graph: fx.Graph, place: dict[fx.Node, int], costs: Iterable[fx.Node]) -> None:
    """Put cheap work into the first slice that reads it, not before."""
    kept = {node for _, value in outputs(graph) for node in _made_from([value])} | set(costs)
    for node in reversed(place):
        items = [user for user in node.users if user in place and _is_item(user)]
        readers = [at for each in (node, *items) for at in _readers(each, place)]
        if readers and not _is_item(node) and kept.isdisjoint([node, *items]):
            place.update(dict.fromkeys([node, *items], min(readers)))


def _readers(node: fx.Node, place: dict[fx.Node, int]) -> list[int]:
    """Slices of the work that reads a value, directly or through views."""
    found: list[int] = []
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user in place:
            found += [] if _is_item(user) else [place[user]]
        else:
            stack.extend(user.users)
    return found


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _made_from(values: Iterable[fx.Node]) -> list[fx.Node]:
    """The values, or where they are views their bases."""
    found: list[fx.Node] = []
    stack = list(values)
    while stack:
        node = stack.pop()
        if _is_redone(node):
            stack.extend(node.all_input_nodes)
        else:
            found.append(node)
    return found


def _is_redone(node: fx.Node) -> bool:
    return is_free(node) or is_size(node)
