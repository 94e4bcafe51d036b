"""``bind_sizes``: every graph takes the open sizes that its values are of.

Inductor wants them: of two sizes whose product is all that crosses a boundary it knows neither.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.graph import copy_placeholder, inputs, output_node, placeholders


def bind_sizes(graphs: SplitGraphs) -> None:
    """Hand open sizes on from graph to graph, as far as these do not find them in their inputs.

    Args:
        graphs: of a joint graph that takes each open size as an input.
    """
    first, second, whole = graphs.backward_input, graphs.backward_weight, graphs.backward
    if first is None or second is None or whole is None:
        return
    known = {_symbol(node.meta["val"]): role for role, node in inputs(graphs.joint.graph).items()}
    late = [known[each] for each in _unbound(second.graph) if each in known]
    saved = {known[each] for each in _unbound(first.graph) | _unbound(whole.graph) if each in known}
    for role in {*late, *saved}:
        node = inputs(graphs.joint.graph)[role]
        _hand_on(node, role, graphs.forward, Kind.SAVED)
        _take(whole.graph, node, Role(Kind.SAVED, role.name))
        _take(first.graph, node, Role(Kind.SAVED, role.name))
    for role in late:
        node = inputs(graphs.joint.graph)[role]
        _hand_on(node, Role(Kind.SAVED, role.name), first, Kind.DEFERRED)
        _take(second.graph, node, Role(Kind.DEFERRED, role.name))


def _hand_on(node: fx.Node, role: Role, module: fx.GraphModule, kind: Kind) -> None:
    """Have a graph return an input."""
    output, handed = output_node(module.graph), Role(kind, role.name)
    if handed not in output.meta["roles"]:
        values: Any = output.args[0]
        output.args = ([*values, _take(module.graph, node, role)],)
        output.meta["roles"] = (*output.meta["roles"], handed)


def _take(graph: fx.Graph, node: fx.Node, role: Role) -> fx.Node:
    """The graph's input, made where there is none."""
    known = inputs(graph).get(role)
    if known is not None:
        return known
    with graph.inserting_before(next(iter(graph.nodes))):
        return copy_placeholder(graph, node, role)


def _symbol(value: Any) -> Any:
    """The symbol that an open size is, by itself."""
    expression = value.node.expr if isinstance(value, torch.SymInt) else None
    return expression if isinstance(expression, sympy.Symbol) else None


def _unbound(graph: fx.Graph) -> set[Any]:
    """Symbols in a graph that are neither inputs nor sizes of inputs."""
    bound: set[Any] = set()
    for node in placeholders(graph):
        value = node.meta["val"]
        sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
        bound |= {_symbol(size) for size in sizes}
    values = [node.meta.get("val") for node in graph.nodes]
    read = [v for v in values if isinstance(v, Tensor | torch.SymInt)]
    return {symbol for value in read for symbol in free_symbols(value)} - bound
