"""The gradients that autograd sums for an input: counted in a trace, and returned one by one.

A block that reads a tensor x twice returns the sum of two gradients. If code outside of the block
also reads x, later in the forward, the order of additions differs from autograd's:

    block's sum       x.grad = later + (a + b)
    autograd          x.grad = (later + a) + b

``return_terms`` lets a graph return a and b, so that the surrounding graph adds them in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from autosplit.passes import Kind, Role
from autosplit.passes.graph import outputs
from autosplit.passes.rewrites.emit import erase

_TERM = " term "
_ACCUMULATION = "Gradient addition node"  # begins a line of the stack traces that torch records


def gradient_counts(inputs: Sequence[Any], results: Sequence[Any]) -> tuple[int | None, ...]:
    """For each input, the number of gradients that autograd sums for it in a backward of all
    results. 0 for an input that no result depends on, or that needs no gradient. None if several
    operators read the input and one is a custom Function, which may return no gradient.
    """
    nodes = [value.grad_fn for value in results if isinstance(value, Tensor) and value.grad_fn]
    seen, counts, uncertain = {*nodes}, Counter[Any](), set[Any]()
    for node in nodes:
        edges = node.next_functions
        counts.update(edges)
        if isinstance(node, BackwardCFunction):
            uncertain.update(edges)
        new = {following for following, _ in edges if following} - seen
        seen |= new
        nodes += new
    ends = map(_edge, inputs)
    return tuple([None if counts[e] > 1 and e in uncertain else counts[e] for e in ends])


def _edge(value: Any) -> tuple[Any, int]:
    if not (isinstance(value, Tensor) and value.requires_grad):
        return None, -1
    edge = get_gradient_edge(value)
    return edge.node, edge.output_nr


def return_terms(graphs: Sequence[fx.Graph], path: str, count: int | None) -> bool:
    """Let graphs return the terms of an input's gradient, in the order in which autograd adds them,
    in place of their sum. False, and no change, if a graph also uses the sum otherwise, or if the
    number of terms is unknown.

    Args:
        graphs: the joint graph and I of one block.
        path: the path of the input. Its gradient becomes the first term.
        count: the number of terms, see ``gradient_counts``.
    """
    if count is None:
        return False
    role = Role(Kind.INPUT_GRAD, path)
    roles = [role, *(Role(role.kind, f"{path}{_TERM}{at}") for at in range(1, count))]
    if all(roles[-1] in dict(outputs(graph)) for graph in graphs):
        return True  # for an earlier call of the block
    chains = [_sums(dict(outputs(graph)).get(role), count - 1) for graph in graphs]
    if not all(chains):
        return False
    for graph, sums in zip(graphs, chains, strict=True):
        terms = [sums[-1].args[0], *(node.args[1] for node in reversed(sums))]
        node, results = graph.output_node(), dict(outputs(graph))
        results |= zip(roles, terms, strict=True)
        node.args = ([*results.values()],)
        node.meta["roles"] = tuple(results)
        erase(graph, sums)
    return True


def path_of_term(name: str) -> str:
    """The path of the input to which a gradient belongs, by the name of the gradient's role."""
    return name.partition(_TERM)[0]


def _sums(value: Any, count: int) -> list[fx.Node]:
    """The additions by which autograd summed ``count + 1`` gradients, the last one first; empty if
    the graph reads one of the sums otherwise.
    """
    sums: list[fx.Node] = []
    while len(sums) < count:
        if not _is_accumulation(value):
            return []
        sums.append(value)
        value = value.args[0]
    return sums


def _is_accumulation(value: Any) -> bool:
    return (
        isinstance(value, fx.Node)
        and value.target is torch.ops.aten.add.Tensor
        and len(value.users) == 1
        and _ACCUMULATION in (value.meta.get("stack_trace") or "")
    )
