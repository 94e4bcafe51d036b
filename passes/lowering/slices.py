"""The fused backward in slices, so that gradients are reduced while later ones are computed.

    slice 0   gradients of the last layers' parameters, and the values that later slices read
    slice 1   gradients of the layers before them, ...
    slice n   the remaining ones, and the gradients of inputs

Operators keep their order, and each runs in one slice. A view is made in each slice that reads it.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import Counter
from typing import Any

from torch import fx

from ..analysis.aliasing import is_free, storage_bytes
from ..analysis.operators import is_effect
from ..graph import Kind, Region, Role, SplitGraphs, calls, outputs, placeholders
from ..partition.extract import extract
from ..partition.regions import walk
from .accumulate import last_work
from .forms import Changed, GraphForm


def slice_backward(program: SplitGraphs, form: GraphForm) -> Changed:
    """Graph pass: at most ``form.count`` slices of the fused backward, in the order in which they
    run.
    """
    module = program.graphs()[form.graph]
    parts = slices(module, form.count)
    return {f"{form.graph}_slice_{at}": part for at, part in enumerate(parts)}


def slices(module: fx.GraphModule, count: int) -> list[fx.GraphModule]:
    """Cut a backward graph so that each slice completes about the same bytes of weight gradients.

    Args:
        module: a graph that returns gradients; not changed.
        count: the most slices.

    Returns:
        the slices in order. Their inputs and results have the roles of ``module``; values that
        cross from slice to slice have the kind SAVED.
    """
    graph = module.graph
    order = {node: at for at, node in enumerate(graph.nodes)}
    ends = _ends(graph, order, count)
    place = {node: bisect_left(ends, at) for node, at in order.items()}
    results: list[list[tuple[Role, Any]]] = [[] for _ in range(len(ends) + 1)]
    for role, value in outputs(graph):
        last = last_work(value, order) if role.kind is Kind.PARAMETER_GRAD else None
        results[-1 if last is None else place[last]].append((role, value))
    crossing = {n: Role(Kind.SAVED, n.name) for n in order if n.op != "placeholder"}
    parts, later = [], set[fx.Node]()
    for at in reversed(range(len(results))):
        passed_on = [node for node in order if node in later and place[node] == at]
        effects = [node for node in calls(graph) if place[node] == at and is_effect(node)]
        wanted = [value for _, value in results[at] if isinstance(value, fx.Node)]
        computed = {node for node in order if place[node] < at and not is_free(node)}
        computed |= {*placeholders(graph)}
        runs, read = walk([*wanted, *passed_on, *effects], computed)
        later = {node for node in later | read if node.op != "placeholder" and place[node] < at}
        live_ins = [node for node in order if node in read]
        returns = [*results[at], *((crossing[node], node) for node in passed_on)]
        name = f"{type(module).__name__}_{at}"
        parts.append(extract(module, name, Region(runs, live_ins), returns, crossing))
    return parts[::-1]


def _ends(graph: fx.Graph, order: dict[fx.Node, int], count: int) -> list[int]:
    """The index of the last node of each slice. The last slice is left out, because it ends with
    the graph.
    """
    nodes, completed = [*order], Counter[int]()  # place -> bytes of gradients complete after it
    for role, value in outputs(graph):
        if role.kind is Kind.PARAMETER_GRAD and (last := last_work(value, order)) is not None:
            at = order[last]
            while nodes[at + 1].target is operator.getitem:  # results of an operator stay together
                at += 1
            completed[at] += storage_bytes(value)
    size, total, ends, level = completed.total(), 0, list[int](), 0
    for at in sorted(completed):
        total += completed[at]
        if total < size and total * count // size > level:
            level = total * count // size
            ends.append(at)
    return ends
