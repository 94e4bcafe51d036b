"""I where no input needs a gradient: the chain of derivatives down to the earliest parameters.

There is no input gradient to tell what I has to compute, so it is told from the other end. W
begins at the last heavy operators on the way to each parameter: products with what the forward
made of the data, convolutions' weight gradients, scatters. What they read is the chain, as 2BP's
p1 is. A product with a weight (dX = dY W) belongs to the chain even if only a bias is below it,
and so do the backwards of norms and attention. What follows such a last operator (a weight that is
itself computed from parameters) is W's, whatever it is.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from ..analysis.aliasing import is_free, is_view, storage_root
from ..analysis.collectives import is_exchange
from ..analysis.operator_cost import flops, is_cheap
from ..graph import Kind, ancestors, calls, descendants, inputs

aten = torch.ops.aten

_MASK = 10  # position of output_mask in convolution_backward's schema

_SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList})

# Parts of the names of backwards that make the gradient of an activation, and those of weights
# only by the way.
_OF_ACTIVATIONS = ("norm_backward", "attention")


def parameter_chain(
    graph: fx.Graph, gradient: set[fx.Node], weight_grads: list[fx.Node]
) -> set[fx.Node]:
    """The nodes that I must run; none where they would be nothing but views of the outputs'
    gradients.

    Args:
        graph: a joint graph in which no input needs a gradient.
        gradient: nodes that depend on the gradient of an output.
        weight_grads: the gradients of parameters.
    """
    work = ancestors(weight_grads) & gradient
    heavy = [node for node in graph.nodes if node in work and not is_cheap(node)]
    data = descendants(list(inputs(graph, Kind.INPUT).values())) - gradient
    weights = _weights(graph, data)
    varying = data | gradient
    making = [node for node in heavy if not _is_of_activations(node, varying, weights)]
    with_data = {node for node in making if _reads_data(node, data, gradient)}
    leading = _before(graph, with_data)
    last = [node for node in with_data if node not in leading]
    waiting = descendants(last)
    # Products of parameters with each other, and scatters to places that no data tells.
    last += [node for node in making if node not in waiting and node not in leading]
    waiting = descendants(last)
    read = [_summed(each) for node in last for each in node.all_input_nodes if each in gradient]
    needed = ancestors([*read, *(node for node in heavy if node not in waiting)])
    computed = (node for node in needed & gradient if node.op == "call_function")
    return set() if all(map(is_free, computed)) else needed


def _summed(node: fx.Node) -> fx.Node:
    """The value behind sums and views, which the minimum cut may leave to W."""
    while node.target in _SUMS or is_view(node):
        node = node.all_input_nodes[0]
    return node


def _before(graph: fx.Graph, nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes from which some of these can be reached."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in nodes or user in found for user in node.users):
            found.add(node)
    return found


def _weights(graph: fx.Graph, data: Collection[fx.Node]) -> set[fx.Node]:
    """The weights: operands of the forward's products that depend on parameters alone."""
    products = (node for node in calls(graph) if node in data and flops(node))
    read = (each for node in products for each in node.all_input_nodes)
    return {storage_root(each) for each in read if each not in data}


def _is_of_activations(
    node: fx.Node, varying: Collection[fx.Node], weights: Collection[fx.Node]
) -> bool:
    """Whether a heavy operator computes the gradient of an activation, not of a weight."""
    if any(part in str(node.target) for part in _OF_ACTIVATIONS) or is_exchange(node):
        return True
    if node.target is aten.convolution_backward.default:
        mask = node.args[_MASK]
        return isinstance(mask, (list, tuple)) and not mask[1]
    others = [each for each in node.all_input_nodes if each not in varying]
    return bool(others and flops(node)) and all(storage_root(each) in weights for each in others)


def _reads_data(node: fx.Node, data: Collection[fx.Node], gradient: Collection[fx.Node]) -> bool:
    read = node.all_input_nodes
    return any(each in data for each in read) or sum(each in gradient for each in read) > 1
