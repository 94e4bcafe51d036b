"""Overlap the backward's collectives with weight gradients.

In a traced graph, the wait for a collective directly follows its start. Between start and wait, a
rank could compute weight gradients that depend on no unfinished collective.

Operators are reordered by a list schedule. An operator is urgent if a later collective depends on
it. Urgent operators keep the order of the graph, which does not depend on costs, so all ranks start
their collectives in the same order. Before an urgent wait, ready operators that are not urgent run,
until the collective is estimated to end. The order changes no result.

The same schedule of the fused backward decides which weight gradients I computes instead of W:
those that fill a wait of I.
"""

from __future__ import annotations

import operator
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from ..analysis.aliasing import is_free, storage_root
from ..analysis.operator_cost import duration, exchange_duration
from ..analysis.operators import is_start, is_wait, start_of
from ..graph import Regions, SplitGraphs, ancestors, calls, is_size, reachable
from ..memory_policy import CollectiveCosts
from .reachability import Reachability
from .regions import with_early_weight_grads

# The fraction of an operator that must fit into the rest of a wait: for one that I computes instead
# of W, and for one that I computes anyway. I has about as many fillers as its waits can take, so
# one that would hardly start in this wait is kept for the next.
_ROOM = 0.4
_ROOM_OF_I = 0.25
_HIDDEN_SHARE = 0.5  # the fraction of a weight gradient's work that must fit into waits


def overlap_collectives(program: SplitGraphs) -> bool:
    """Reorder I, W and the fused backward; True if the order changed."""
    rooms = {"backward_input": _ROOM_OF_I, "backward_weight": 0.0, "backward": 0.0}
    graphs = [(m.graph, rooms[name]) for name, m in program.graphs().items() if name in rooms]
    costs = program.memory.collectives
    return sum(_overlap(graph, costs, room) for graph, room in graphs) > 0


def _overlap(graph: fx.Graph, costs: CollectiveCosts, room: float) -> bool:
    nodes = list(calls(graph))
    if not any(map(is_start, nodes)):
        return False
    order, _ = ListSchedule(nodes, costs, room).run()
    output = graph.output_node()
    for node in order:
        output.prepend(node)
    return order != nodes


def hide_collectives(
    graph: fx.Graph, reach: Reachability, regions: Regions, costs: CollectiveCosts
) -> Regions:
    """Move weight gradients that fill a wait of I from W to I. Return ``regions`` itself if no
    weight gradient fills a wait.

    Args:
        graph: the joint graph.
        reach: sets of the graph's nodes, by the results that need them.
        regions: the division of the graph.
        costs: the costs of collectives.
    """
    if not any(map(is_start, regions.input.runs)):
        return regions
    late = regions.weight.runs - regions.input.runs
    needed: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in reach.weight_grads:
        root = storage_root(node)
        if root in reach.early_candidates and node not in regions.early_weight_grads:
            needed[root] |= ancestors([node]) & late
    nodes = [node for node in calls(graph) if node in regions.backward.runs]
    _, filling = ListSchedule(nodes, costs, _ROOM).run()
    hiding = {node for node, wait in filling.items() if wait in regions.input.runs}
    more = {
        root
        for root, work in needed.items()
        if sum(map(duration, work & hiding)) >= _HIDDEN_SHARE * sum(map(duration, work)) > 0
    }
    wanted = [node for node in reach.weight_grads if storage_root(node) in more]
    return with_early_weight_grads(graph, reach, regions, wanted) if wanted else regions


class ListSchedule:
    """A list schedule with two resources: the device, which runs operators one after another, and
    the link, which runs collectives in the order of their starts.

    Args:
        nodes: operators in their present order; operands that are not among ``nodes`` exist from
            the start.
        costs: the costs of collectives.
        room: the fraction of a filler's duration that must fit into the rest of a wait.
    """

    def __init__(self, nodes: Sequence[fx.Node], costs: CollectiveCosts, room: float) -> None:
        self._costs, self._room = costs, room
        self._index = {node: at for at, node in enumerate(nodes)}
        self._heavy = [node for node in nodes if not _is_light(node)]
        # Operators that take no time run just before their first reader, which inherits their
        # reads.
        self._reads: dict[fx.Node, set[fx.Node]] = {}
        for node in nodes:
            read = [operand for operand in node.all_input_nodes if operand in self._index]
            self._reads[node] = {n for e in read for n in (self._reads[e] if _is_light(e) else [e])}
        self._urgent = reachable(filter(is_start, nodes), self._reads.__getitem__)
        self._readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._missing = {node: len(self._reads[node]) for node in self._heavy}
        for node in self._heavy:
            for source in self._reads[node]:
                self._readers[source].append(node)
        # Ready operators in order, by (urgent, wait).
        self._ready: dict[tuple[bool, bool], list[fx.Node]] = defaultdict(list)
        self._order: dict[fx.Node, None] = {}
        self._filling: dict[fx.Node, fx.Node] = {}
        self._clock = self._link = 0.0
        self._ends: dict[fx.Node, float] = {}

    def run(self) -> tuple[list[fx.Node], dict[fx.Node, fx.Node]]:
        """The operators in order, and a map from each operator that fills a wait to the wait."""
        for node in self._heavy:
            self._arrive(node)
        keys = ((True, False), (True, True), (False, False), (False, True))
        urgent, waits, fillers, late_waits = (self._ready[key] for key in keys)
        while urgent or waits or fillers or late_waits:
            wait = None if urgent else next(iter(waits or late_waits), None)
            filler = None if wait is None else self._filler(fillers, self._end(wait) - self._clock)
            if filler is not None and wait is not None:
                self._filling[filler] = wait
            self._emit(filler or (urgent or waits or fillers or late_waits)[0])
        for node in self._index:  # operators without readers here
            self._append(node)
        return list(self._order), self._filling

    def _filler(self, ready: Sequence[fx.Node], left: float) -> fx.Node | None:
        """The oldest ready operator that fits into the rest of a wait."""
        fits = (node for node in ready if left > 0 and self._room * duration(node) <= left)
        return next(fits, None)

    def _end(self, wait: fx.Node) -> float:
        return self._ends.get(start_of(wait), 0.0)

    def _arrive(self, node: fx.Node) -> None:
        """Record an operator as ready, if all its operands are."""
        if not self._missing[node]:
            ready = self._ready[node in self._urgent, is_wait(node)]
            insort(ready, node, key=self._index.__getitem__)

    def _emit(self, node: fx.Node) -> None:
        """Schedule an operator, and the views that it reads."""
        self._ready[node in self._urgent, is_wait(node)].remove(node)
        self._append(node)
        if is_start(node):
            self._link = max(self._clock, self._link) + exchange_duration(node, self._costs)
            self._ends[node] = self._link
        elif is_wait(node):
            self._clock = max(self._clock, self._end(node))
        else:
            self._clock += duration(node)
        for reader in self._readers[node]:
            self._missing[reader] -= 1
            self._arrive(reader)

    def _append(self, node: fx.Node) -> None:
        stack = [node]
        while stack:
            missing = [
                operand
                for operand in stack[-1].all_input_nodes
                if operand in self._index and operand not in self._order
            ]
            if missing:
                stack += missing
            else:
                self._order[stack.pop()] = None


def _is_light(node: fx.Node) -> bool:
    """Whether the node takes no time; it then runs just before its first reader."""
    return is_free(node) or node.target is operator.getitem or is_size(node)
