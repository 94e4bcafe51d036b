"""Rewrite a backward graph that returns new values of state, so that it writes state in place.

    total = add(into, product)     add_(into, product)      a sum, where it is computed
    return [..., maximum]          copy_(into, maximum)     other state, at the end of the graph

Sums are written in place, so W holds one product at a time, not a second copy of all sums.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..analysis.operators import SUMS, WRITE
from ..graph import (
    BACKWARD_WRITE,
    Kind,
    Role,
    SplitGraphs,
    add_placeholder,
    inputs,
    module_like,
    outputs,
    set_outputs,
)
from .accumulate import write_into
from .forms import Changed, GraphForm


def written(graph: fx.Graph) -> list[Role]:
    """The roles of the state that a backward graph writes, in order."""
    return [Role(Kind.WRITTEN, role.name) for role, _ in outputs(graph, *BACKWARD_WRITE)]


def write_state(program: SplitGraphs, form: GraphForm) -> Changed:
    """Graph pass: make the backward graph ``form.graph`` write state in place, instead of returning
    new values. Returns an empty mapping if the graph writes no state.
    """
    module = program.graphs()[form.graph]
    if not written(module.graph):
        return {}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(module.graph, copies)
    into = {role.name: node for role, node in inputs(graph, Kind.WRITTEN).items()}
    for role, value in outputs(module.graph, *BACKWARD_WRITE):
        new = copies[value]
        if role.name not in into:  # the new value does not depend on the old one
            into[role.name] = _placeholder(graph, role.name, new)
        if role.kind is Kind.BACKWARD_UPDATE:
            write_into(graph, WRITE, into[role.name], new)
        elif (sums := _additions(new, into[role.name])) is None:
            with graph.inserting_after(new):
                write_into(graph, WRITE, into[role.name], new)
        else:
            for node in sums:
                node.target = SUMS[node.target]
                node.args = (into[role.name], *node.args[1:])
    kept = [pair for pair in outputs(module.graph) if pair[0].kind not in BACKWARD_WRITE]
    set_outputs(graph, kept, copies)
    return {form.graph: module_like(module, graph, "writing")}


def _additions(new: Any, into: fx.Node) -> list[fx.Node] | None:
    """The additions that compute ``new`` from ``into``; None if other operators take part."""
    sums: list[fx.Node] = []
    while new is not into:
        if new.target not in SUMS:
            return None
        sums.append(new)
        new = new.args[0]
    return sums


def _placeholder(graph: fx.Graph, name: str, value: fx.Node) -> fx.Node:
    with graph.inserting_before(next(iter(graph.nodes))):
        role = Role(Kind.WRITTEN, name)
        return add_placeholder(graph, f"{value.name}_into", value.meta["val"], role)
