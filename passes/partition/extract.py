"""Extract a subgraph, given its live-ins, nodes and results."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import producer
from ..analysis.operators import is_check
from ..graph import (
    Region,
    Role,
    copy_node,
    copy_placeholder,
    module_like,
    placeholders,
    set_outputs,
)


def extract(
    module: fx.GraphModule,
    name: str,
    region: Region,
    returns: list[tuple[Role, Any]],
    crossing: Mapping[fx.Node, Role] = MappingProxyType({}),
) -> fx.GraphModule:
    """Extract the graph of a region. Its inputs are the region's live-ins and placeholders. Its
    other nodes keep the order of ``module``, but recomputed nodes run just before their first
    reader, so that their values do not take memory before they are needed.

    Args:
        module: the graph from which nodes are copied.
        name: class name of the new module.
        region: the nodes to copy.
        returns: role and value of every result.
        crossing: the roles of the live-ins that another graph passes on. Other live-ins keep their
            roles.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    live_ins, in_place = {*region.live_ins}, region.runs - region.recomputed
    for node in module.graph.nodes:
        if node in live_ins:
            copies[node] = copy_placeholder(graph, node, crossing.get(node))
        elif node.op == "placeholder" and node in region.runs:
            copies[node] = copy_placeholder(graph, node)
        elif node in in_place or _checks(node, in_place):
            copy_behind(graph, node, copies)
    for _, value in returns:
        if isinstance(value, fx.Node):
            copy_behind(graph, value, copies)
    _take_apart_at_once(graph)
    set_outputs(graph, returns, copies)
    return module_like(module, _placeholders_first(graph), name)


def _checks(node: fx.Node, computed: set[fx.Node]) -> bool:
    """Whether the node checks only values that the extracted graph computes. A check of a
    recomputed value is not repeated.
    """
    return is_check(node) and computed.issuperset(map(producer, node.all_input_nodes))


def copy_behind(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
    """Copy a node, after copying those of its operands that have no copy yet."""
    stack = [node]
    while stack:
        missing = [operand for operand in stack[-1].all_input_nodes if operand not in copies]
        if stack[-1] in copies:
            stack.pop()
        elif missing:
            stack.extend(reversed(missing))
        else:
            current = stack.pop()
            copies[current] = copy_node(graph, current, copies)


def copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Add a clone of a value that is overwritten before its last read; return the clone."""
    after = node if node.op != "placeholder" else placeholders(graph)[-1]
    with graph.inserting_after(after):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = {key: value for key, value in node.meta.items() if key != "role"}
    return copy


def _take_apart_at_once(graph: fx.Graph) -> None:
    """Move every getitem directly after the operator whose tuple it reads. A tuple keeps all its
    items alive until the last item is read.
    """
    for node in reversed(graph.find_nodes(op="call_function", target=operator.getitem)):
        parent = node.args[0]
        if isinstance(parent, fx.Node) and parent.op != "placeholder":
            parent.append(node)


def _placeholders_first(graph: fx.Graph) -> fx.Graph:
    """Move placeholders to the front. A carried value may come from the middle of the graph."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in placeholders(graph):
        first.prepend(node)
    return graph
