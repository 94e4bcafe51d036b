"""Recompute results of called graphs in the backward, where that frees memory.

Blocks are divided one by one, so a block saves tensors without knowing what the blocks around it
save, and equal blocks save equal tensors. This pass looks at all calls together:

    x = norm(u)    the last operator of block 1, whose I reads u
    y = x @ w      the first operator of block 2, whose W reads x

Without the pass, both u and x are kept. With it, I computes x again from u. In the same way, some
of several equal blocks recompute a saved tensor, if the time does not suffice for all of them.
"""

from __future__ import annotations

from typing import Any, cast

from torch import fx

from ..analysis.aliasing import is_view, storage_bytes
from ..analysis.operator_cost import duration, recompute_cost
from ..analysis.operators import checkpoint_region
from ..graph import SUBGRAPH, Kind, Region, Role, SplitGraphs, calls, descendants, inputs, outputs
from ..subgraph import Subgraph, call_subgraph, operands, subgraph_of
from .extract import extract
from .multiplier_search import RATES
from .regions import walk

Steps = dict[fx.Node, tuple[Subgraph, list[fx.Node]]]
"""Results of calls, in order -> (the graph that recomputes the result, its arguments)."""


def recompute_results(program: SplitGraphs) -> bool:
    """Let the backward recompute results of called graphs, within the time that the memory setting
    allows. Recomputation inside of the called graphs counts, too. The results that free the most
    bytes for their time come first, then those of earlier calls.

    Returns:
        whether a result is recomputed.
    """
    graph = program.joint.graph
    called = [node.meta[SUBGRAPH] for node in calls(graph) if SUBGRAPH in node.meta]
    if not (called and program.memory.recomputes_results):
        return False
    total = sum(map(duration, calls(graph)))
    left = program.memory.recompute * total - sum(block.recompute_time for block in called)
    joint = _JointGraph(graph)
    plans = {node: steps for node in graph.nodes if (steps := joint.steps(node))}
    times = {node: sum(again.duration for again, _ in plans[node].values()) for node in plans}
    for node in sorted(plans, key=lambda node: times[node] / storage_bytes(node)):
        if times[node] <= left and RATES[0] * times[node] <= storage_bytes(node):
            left -= times[node]
            joint.repeat(plans[node])
    return bool(joint.copies)


class _JointGraph:
    """A joint graph whose backward may recompute results of calls.

    Attributes:
        copies: maps results to the nodes that recompute them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._backward = descendants(inputs(graph, Kind.TANGENT, Kind.WRITTEN).values())
        self._graphs: dict[tuple[Subgraph, int], Subgraph | None] = {}
        self.copies: dict[fx.Node, fx.Node] = {}

    def steps(self, node: fx.Node) -> Steps:
        """The steps that make it unnecessary to save a result of a call. Empty if there are
        none."""
        is_kept = any(user.op == "output" or is_view(user) for user in node.users)
        return self._steps(node) if self._is_read(node) and not is_kept else {}

    def repeat(self, steps: Steps) -> None:
        """Let the backward read recomputed results."""
        first = next(node for node in calls(self._graph) if node in self._backward)
        for result, (again, arguments) in steps.items():
            if result in self.copies:
                continue
            copies = [self.copies.get(node, node) for node in arguments]
            with self._graph.inserting_before(first):
                (copy,) = call_subgraph(self._graph, again, copies, [result.meta["val"]])
            copy.name, result.name = result.name, copy.name  # reports name what is kept
            for node in (copy, *copy.all_input_nodes):
                node.meta = result.meta | node.meta
            result.replace_all_uses_with(copy, lambda user: user in self._backward)
            self.copies[result] = copy

    def _is_read(self, node: fx.Node) -> bool:
        return node not in self._backward and not self._backward.isdisjoint(node.users)

    def _steps(self, result: fx.Node, *, nested: bool = False) -> Steps:
        """The steps that recompute a result from parameters, from other values that the backward
        reads, and from results that are themselves recomputed from these.
        """
        called = subgraph_of(result)
        if called is None:
            return {}
        call, place = cast(tuple[fx.Node, int], result.args)
        if (called, place) not in self._graphs:
            self._graphs[called, place] = repeating(called, place)
        again, steps = self._graphs[called, place], Steps()
        if again is None:
            return {}
        items: dict[Any, fx.Node] = {item.args[1]: item for item in call.users}
        values = dict(zip(called.arguments, operands(call), strict=True))
        values |= {role: items[at] for role, at in called.results.items() if at in items}
        arguments = [values[role] for role in again.arguments]
        for role, node in zip(again.arguments, arguments, strict=True):
            if role.kind is not Kind.PARAMETER and not self._is_read(node):
                more = {} if nested else self._steps(node, nested=True)
                if not more:
                    return {}
                steps |= more
        return steps | {result: (again, arguments)}


def repeating(called: Subgraph, place: int) -> Subgraph | None:
    """A graph that computes a result of a called graph again, from the inputs and the other saved
    tensors of the called graph. None if an operator must not run twice, or if no memory would be
    freed.

    Args:
        called: the forward of a block.
        place: the position of the result.
    """
    module, owners = called.module, called.storage_owners
    values = [value for _, value in outputs(module.graph)]
    roles = {at: role for role, at in called.results.items() if role.kind is Kind.SAVED}
    saved = {node: roles[at] for at, node in enumerate(values) if at in roles and at != place}
    arguments = inputs(module.graph, Kind.PARAMETER, Kind.INPUT).values()
    runs, read = walk([values[place]], {*saved, *arguments})
    is_cheap = all(recompute_cost(n) is not None and checkpoint_region(n) is None for n in runs)
    shares_storage = owners[place] is not None or (True, place) in owners
    if shares_storage or not (is_cheap and storage_bytes(values[place])):
        return None
    name = f"{called.name.removesuffix('_forward')}_recomputed_{place}"
    result: list[tuple[Role, Any]] = [(Role(Kind.OUTPUT, name), values[place])]
    return Subgraph.of(name, extract(module, name, Region(runs, [*read]), result, saved))
