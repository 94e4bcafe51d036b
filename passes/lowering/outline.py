"""Outlining: what stands between the calls of a graph becomes graphs that are called as well.

A compiler that takes seconds is then given each kind of block once, and what is around them once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..analysis.aliasing import is_free
from ..graph import (
    SUBGRAPH,
    Kind,
    Role,
    module_like,
    outputs,
    placeholders,
    role_of,
    set_outputs,
)
from ..partition.extract import copy_placeholder
from ..subgraph import Subgraph, call_subgraph, subgraph_of


def outline(module: fx.GraphModule) -> fx.GraphModule:
    """A graph that calls graphs and makes views, and does nothing else.

    Args:
        module: a graph that calls others; not changed.
    """
    return _Outlining(module).run()


class _Outlining:
    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._graph = fx.Graph()
        self._copies = {n: copy_placeholder(self._graph, n) for n in placeholders(module.graph)}
        self._run: list[fx.Node] = []
        self._made = 0

    def run(self) -> fx.GraphModule:
        for node in self._module.graph.nodes:
            if SUBGRAPH in node.meta:
                self._end_run()
            if subgraph_of(node) is not None:
                self._copy(node)
            elif node.op not in {"placeholder", "output"}:
                self._run.append(node)
        self._end_run()
        pairs = outputs(self._module.graph)
        values = fx.node.map_arg([value for _, value in pairs], self._copies.__getitem__)
        set_outputs(self._graph, list(zip([role for role, _ in pairs], values, strict=True)))
        return module_like(self._module, self._graph, "outlined")

    def _copy(self, node: fx.Node) -> None:
        self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)

    def _end_run(self) -> None:
        """Have the operators since the last call be a graph, or themselves if all are free."""
        run, self._run = self._run, []
        if all(map(is_free, run)):
            for node in run:
                self._copy(node)
            return
        inside = set(run)
        taken = dict.fromkeys(o for n in run for o in n.all_input_nodes if o not in inside)
        given = [node for node in taken if not _is_sum(node)]
        totals = [node for node in taken if _is_sum(node)]
        results = [node for node in run if not inside.issuperset(node.users)]
        called = self._called(run, [*given, *totals], results)
        values = [node.meta["val"] for node in results]
        before, into = ([self._copies[node] for node in each] for each in (given, totals))
        made = call_subgraph(self._graph, called, before, values, into)
        self._copies.update(zip(results, made, strict=True))

    def _called(
        self, run: Sequence[fx.Node], taken: Sequence[fx.Node], results: Sequence[fx.Node]
    ) -> Subgraph:
        graph = fx.Graph()
        copies = {node: _placeholder(graph, node) for node in taken}
        for node in run:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        set_outputs(graph, [(Role(Kind.OUTPUT, node.name), copies[node]) for node in results])
        self._made += 1
        name = f"part_{self._made}"
        return Subgraph(name, module_like(self._module, graph, name), {})


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """One for a value; what may be written over around may be read behind."""
    copy = graph.placeholder(node.name)
    copy.target = copy.name
    role = role_of(node) if node.op == "placeholder" else Role(Kind.INPUT, f"%{node.name}")
    copy.meta = {"val": node.meta["val"], "role": role}
    return copy


def _is_sum(node: fx.Node) -> bool:
    return node.op == "placeholder" and role_of(node).kind is Kind.ACCUMULATOR
