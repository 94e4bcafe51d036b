"""Sets of nodes of a joint graph, by the results that need the nodes.

If no input needs a gradient, I is the chain of derivatives down to the earliest parameters.

Without input gradients, W determines what remains for I. W begins at the last heavy operators on
the way to each parameter: products with activations, convolutions' weight gradients, scatters. The
chain consists of the gradients that these last operators read, and of all nodes on which those
gradients depend. It is the backward-p1 of 2BP. A product with a weight (dX = dY W) belongs to the
chain even if only a bias is below it, and so do the backwards of norms and attention. All operators
after a last heavy operator belong to W. Such operators exist if a weight is itself computed from
parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import cached_property

import torch
from torch import fx

from ..analysis.aliasing import is_free, is_view, storage_root
from ..analysis.operator_cost import flops, is_cheap
from ..analysis.operators import (
    OPERATORS,
    OUTPUT_MASK,
    checkpoint_region,
    is_check,
    is_effect,
    is_exchange,
    is_random,
    is_read,
)
from ..errors import PassError
from ..graph import (
    FORWARD_OUTPUT,
    WEIGHT_OUTPUT,
    Kind,
    Role,
    ancestors,
    calls,
    computed_outputs,
    descendants,
    inputs,
    is_state,
    origin_of,
    outputs,
)


@dataclasses.dataclass(frozen=True)
class Reachability:
    """Sets of nodes of one joint graph.

    Attributes:
        forward: nodes that the forward's outputs, side effects and random operators need.
        gradient: nodes that depend on the gradient of an output.
        input_grad_closure: nodes that I must run: reads of Python attributes, and all that input
            gradients need. If no input needs a gradient, the chain of derivatives down to the
            earliest parameters, see ``parameter_chain``.
        recomputed: nodes of ``forward`` that the user wants recomputed and not saved.
        overwritten: buffers and inputs to which the forward writes a new value at its end.
        input_grads: nodes of the input gradients and new values of state that I returns.
        weight_grads: nodes of the weight gradients and new values of state that W returns.
        late: nodes that W must run, because they read state that W writes.
    """

    forward: set[fx.Node]
    gradient: set[fx.Node]
    input_grad_closure: set[fx.Node]
    recomputed: set[fx.Node]
    overwritten: set[fx.Node]
    input_grads: list[fx.Node]
    weight_grads: list[fx.Node]
    late: set[fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph, *, defer_whole_backward: bool = False) -> Reachability:
        """Classify the nodes of a joint graph.

        Args:
            graph: the graph.
            defer_whole_backward: see ``Memory``.

        Raises:
            PassError: an output of the forward depends on an output's gradient.
        """
        reads = [*filter(is_read, calls(graph))]
        gradient = descendants([*inputs(graph, Kind.TANGENT, Kind.WRITTEN).values(), *reads])
        # Effects of the forward, assertions on values above all, stay in it though nobody reads
        # them, and so do random operators, which move the generator.
        unread = [n for n in calls(graph) if is_random(n) or (is_effect(n) and _is_forwards(n))]
        results = _values(graph, *FORWARD_OUTPUT)
        forward = ancestors([*results, *(node for node in unread if node not in gradient)])
        if forward & gradient:
            names = ", ".join(sorted(node.name for node in forward & gradient)[:5])
            raise PassError(f"forward values depend on output gradients: {names}")
        input_grads = _values(graph, Kind.INPUT_GRAD, Kind.BACKWARD_UPDATE)
        weight_grads = _values(graph, *WEIGHT_OUTPUT)
        input_grad_closure = ancestors([*input_grads, *reads])
        sums = [Role(Kind.WRITTEN, role.name) for role, _ in outputs(graph, Kind.BACKWARD_SUM)]
        into = [*map(inputs(graph).__getitem__, sums)]
        if not (outputs(graph, Kind.INPUT_GRAD) or defer_whole_backward):
            input_grad_closure |= parameter_chain(graph, gradient, weight_grads)
        return cls(
            forward=forward,
            gradient=gradient,
            input_grad_closure=input_grad_closure,
            recomputed={node for node in forward if _is_inside_checkpoint(node, gradient)},
            overwritten=_overwritten(graph),
            input_grads=input_grads,
            weight_grads=weight_grads,
            late=descendants(into) - {*into},
        )

    @cached_property
    def early_candidates(self) -> set[fx.Node]:
        """The nodes that allocate weight gradients that I may compute. Gradients that ranks reduce
        are excluded: all ranks must run a collective in the same half of the backward, and one
        rank's cost estimate must not decide which half.
        """
        reduced = descendants(
            [n for n in self.gradient - self.input_grad_closure if is_exchange(n)]
        )
        reduced |= self.late
        roots = {storage_root(node) for node in self.weight_grads if node not in reduced}
        return {node for node in roots & self.gradient if node.op == "call_function"}

    def is_kept(self, node: fx.Node) -> bool:
        """Whether the module keeps the value until W anyway: a parameter, or a buffer that the
        forward does not overwrite.
        """
        return is_state(node) and node not in self.overwritten


def _is_forwards(node: fx.Node) -> bool:
    """Whether a node with an effect belongs to the forward. All do, except a check of a value that
    the backward computes.
    """
    return not is_check(node) or not origin_of(node).is_backward


def _values(graph: fx.Graph, *kinds: Kind) -> list[fx.Node]:
    return [value for _, value in computed_outputs(graph, *kinds)]


def _is_inside_checkpoint(node: fx.Node, gradient: set[fx.Node]) -> bool:
    """Whether the user asked for recomputation and only the checkpointed region reads the value. A
    value that leaves the region may be saved.
    """
    region = checkpoint_region(node)
    # Derivatives of the operator may read no gradient, such as a power of the value.
    readers = [u for u in node.users if u not in gradient and not origin_of(u).is_backward]
    return region is not None and all(checkpoint_region(user) == region for user in readers)


def _overwritten(graph: fx.Graph) -> set[fx.Node]:
    names = {role.name for role, _ in outputs(graph, Kind.UPDATE)}
    state = inputs(graph, Kind.BUFFER, Kind.INPUT)
    return {node for role, node in state.items() if role.name in names}


# Parts of the names of backwards that make the gradient of an activation, and those of weights
# only by the way.
_OF_ACTIVATIONS = ("norm_backward", "attention")


def parameter_chain(
    graph: fx.Graph, gradient: set[fx.Node], weight_grads: list[fx.Node]
) -> set[fx.Node]:
    """The nodes that I must run if no input needs a gradient. Empty if these nodes compute nothing
    but views of the outputs' gradients.

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
    leading = ancestors(operand for node in with_data for operand in node.all_input_nodes)
    last = [node for node in with_data if node not in leading]
    waiting = descendants(last)
    # Products of parameters with each other, and scatters to places that no data tells.
    last += [node for node in making if node not in waiting and node not in leading]
    waiting = descendants(last)
    read = [_summed(arg) for node in last for arg in node.all_input_nodes if arg in gradient]
    needed = ancestors([*read, *(node for node in heavy if node not in waiting)])
    computed = (node for node in needed & gradient if node.op == "call_function")
    return set() if all(map(is_free, computed)) else needed


def _summed(node: fx.Node) -> fx.Node:
    """The value from which reductions and views compute a node's value; the node itself if it is
    neither a reduction nor a view. The minimum cut may leave reductions and views to W.
    """
    while node.target in OPERATORS["reduces"] or is_view(node):
        node = node.all_input_nodes[0]
    return node


def _weights(graph: fx.Graph, data: Collection[fx.Node]) -> set[fx.Node]:
    """The weights: operands of the forward's products that depend on parameters alone."""
    products = (node for node in calls(graph) if node in data and flops(node))
    operands = (arg for node in products for arg in node.all_input_nodes)
    return {storage_root(operand) for operand in operands if operand not in data}


def _is_of_activations(
    node: fx.Node, varying: Collection[fx.Node], weights: Collection[fx.Node]
) -> bool:
    """Whether a heavy operator computes the gradient of an activation, not of a weight."""
    if any(part in str(node.target) for part in _OF_ACTIVATIONS) or is_exchange(node):
        return True
    if node.target is torch.ops.aten.convolution_backward.default:
        mask = node.args[OUTPUT_MASK]
        return isinstance(mask, (list, tuple)) and not mask[1]
    fixed = [arg for arg in node.all_input_nodes if arg not in varying]
    return bool(fixed and flops(node)) and all(storage_root(arg) in weights for arg in fixed)


def _reads_data(node: fx.Node, data: Collection[fx.Node], gradient: Collection[fx.Node]) -> bool:
    args = node.all_input_nodes
    return any(arg in data for arg in args) or sum(arg in gradient for arg in args) > 1
