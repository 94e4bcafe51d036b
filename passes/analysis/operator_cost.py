"""Cost model of a node: FLOPs, memory traffic, time, and cost of recomputation.

``weight_flops`` counts how much of the weight gradients W computes, and how much I.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..graph import (
    SUBGRAPH,
    Kind,
    Role,
    SplitGraphs,
    ancestors,
    calls,
    computed_outputs,
    concrete,
    is_size,
    reachable,
    role_of,
    tensor_of,
    with_concrete_sizes,
)
from ..memory_policy import CollectiveCosts
from .aliasing import is_free, is_view
from .operators import OPERATORS, is_effect, is_exchange, is_random, overload

# Floating-point operations of a matrix product in the time of moving one byte: about ten on a CPU
# core, well over a hundred on an accelerator.
_BALANCE_CPU = 10.0
_BALANCE = 150.0

_CALL = 20_000  # the overhead of calling an operator (1 to 10 us), in bytes moved

_SLOW = 3  # a slow operator counts as this many passes over its operands


def is_cheap(node: fx.Node) -> bool:
    """Whether the node is a view, pointwise work or a plain reduction.

    Such a node may run on either side of a boundary; matrix products, convolutions,
    scatters and anything unknown stay where reachability puts them.
    """
    if node.target is operator.getitem or is_view(node):
        return True
    op = overload(node)
    if op is not None and torch.Tag.data_dependent_output in op.tags:
        return False  # it synchronises with the device
    if op is None or is_size(node):
        return node.op == "call_function" and tensor_of(node) is None
    if is_random(node) or is_effect(node):
        return False
    return (
        torch.Tag.pointwise in op.tags or torch.Tag.reduction in op.tags or op in OPERATORS["cheap"]
    )


def _of_grouped_product(first: Any, second: Any, *_: Any, out_val: Any, **options: Any) -> int:
    """FLOPs of ``aten._grouped_mm``. If both operands are matrices, the groups divide the summed
    dimension, so each result sums over one group only.
    """
    groups = len(out_val) if first.dim() == second.dim() == 2 else 1
    return int(2 * out_val.numel() * first.shape[-1] // groups)


_FORMULAS = {torch.ops.aten._grouped_mm: _of_grouped_product}  # not in torch's table


def flops(node: fx.Node, size: Callable[[Any], int] = concrete) -> int:
    """Floating-point operations of a node, as ``torch.utils.flop_counter`` counts them: matrix
    products, attention and convolutions, and also grouped products. Other operators count 0.

    Args:
        node: the node.
        size: returns the number for a symbolic size; by default that of the example inputs.
    """
    op = overload(node)
    packet: Any = None if op is None else op.overloadpacket
    formula = flop_registry.get(packet, _FORMULAS.get(packet))
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg(
        (node.args, dict(node.kwargs)), lambda n: with_concrete_sizes(n.meta.get("val"), size)
    )
    result = with_concrete_sizes(node.meta.get("val"), size)
    return int(formula(*args, **kwargs, out_val=result))


def traffic(node: fx.Node) -> int:
    """Bytes that a node reads and writes, each tensor once; 0 for a view."""
    if node.op != "call_function" or node.target is operator.getitem or is_view(node):
        return 0
    touched = [*node.all_input_nodes, node]
    return sum(value_bytes(node.meta.get("val")) for node in touched)


def value_bytes(value: Any) -> int:
    """Bytes of the elements of a tensor, or of all tensors of a tuple."""
    match value:
        case torch.Tensor():
            return concrete(value.numel()) * value.element_size()
        case list() | tuple():
            return sum(map(value_bytes, value))
    return 0


def duration(node: fx.Node) -> float:
    """Estimated time of a node, in units of the time that the device takes to move one byte. A
    collective counts 0, as the device is free meanwhile. A call of a subgraph counts all operators
    of the subgraph.
    """
    called = node.meta.get(SUBGRAPH)
    if called is not None:
        return float(called.duration)
    moved = 0 if is_exchange(node) else traffic(node)
    if not moved:
        return 0.0
    passes = _SLOW if overload(node) in OPERATORS["slow"] else 1
    return _CALL + moved * passes + flops(node) / _balance(node)


def exchange_duration(node: fx.Node, costs: CollectiveCosts) -> float:
    """Time from the start of a collective to its end, in the unit of ``duration``."""
    largest = max(
        value_bytes(value_node.meta.get("val")) for value_node in (node, *node.all_input_nodes)
    )
    exchanged = largest * (2 if "all_reduce" in str(node.target) else 1)
    return costs.start + costs.byte * exchanged


def recompute_cost(node: fx.Node) -> float | None:
    """Cost of recomputing the node, in the unit of ``duration``; None if it must not be recomputed.

    Views and constants are free. Pointwise work, copies and the reductions of norms may be
    recomputed. Never recomputed are matrix products, convolutions, attention, gathers, random
    operators, operators with effects, and unknown ones.
    """
    if is_free(node) or node.target is operator.getitem:
        return 0.0
    if not is_cheap(node) and overload(node) not in OPERATORS["norm"]:
        return None
    return duration(node)


def effort(node: fx.Node) -> int:
    """FLOPs of a node. For a node without FLOPs, its ``duration`` expressed in FLOPs."""
    return flops(node) or round(duration(node) * _balance(node))


def _balance(node: fx.Node) -> float:
    tensor = tensor_of(node)
    return _BALANCE if tensor is None else balance(tensor.device)


def balance(device: torch.device) -> float:
    """Floating-point operations that a device is assumed to do in the time of moving one byte."""
    return _BALANCE_CPU if device.type == "cpu" else _BALANCE


def graph_flops(graph: fx.Graph) -> int:
    """Floating-point operations of one run of the graph."""
    return sum(flops(node) for node in calls(graph))


def weight_flops(graphs: SplitGraphs) -> tuple[int, int]:
    """Return (FLOPs in W, FLOPs in I) of the matrix products that compute weight gradients. I
    computes some weight gradients because the memory setting asks for it, to hide a collective, or
    because one operator computes the gradients of input and weight together.

    Args:
        graphs: the split graphs, with calls of subgraphs inlined.
    """
    if graphs.backward_weight is None or graphs.backward_input is None:
        return 0, 0
    late, deferred = _products(_gradients(graphs.backward_weight, ()))
    gradients = _gradients(graphs.backward_input, deferred)
    results = computed_outputs(graphs.backward_input.graph, Kind.INPUT_GRAD)
    input_grad_closure = ancestors(value for _, value in results)
    early = _products(gradients)[0] - input_grad_closure
    return sum(map(flops, late)), sum(map(flops, early))


def _gradients(module: fx.GraphModule, also: Collection[Role]) -> list[fx.Node]:
    """Nodes of the weight gradients that a graph returns, and nodes of the graph's results whose
    roles are in ``also``.
    """
    return [
        value
        for role, value in computed_outputs(module.graph)
        if role.kind is Kind.PARAMETER_GRAD or role in also
    ]


def _products(values: list[fx.Node]) -> tuple[set[fx.Node], set[Role]]:
    """Follow values back through views and sums. Return the matrix products at which the values
    end, and the roles of the graph inputs at which the values end.
    """

    def summed(node: fx.Node) -> list[fx.Node]:
        hands_on = node.target is operator.getitem or node.target in OPERATORS["hands_on"]
        passes_on = hands_on or is_view(node) or is_exchange(node)
        return node.all_input_nodes if passes_on and not flops(node) else []

    ends = reachable(values, summed)
    products = {node for node in ends if flops(node)}
    return products, {role_of(node) for node in ends if node.op == "placeholder"}
