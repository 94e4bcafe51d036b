"""Where the products that make weight gradients run, in the graphs as they are."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from ..graph import Kind, Role, SplitGraphs, ancestors, outputs, role_of
from .aliasing import is_view
from .collectives import is_exchange
from .operator_cost import flops

aten = torch.ops.aten

_HAND_ON = frozenset({aten.add.Tensor, aten.clone.default, aten._to_copy.default, operator.getitem})


def weight_flops(graphs: SplitGraphs) -> tuple[int, int]:
    """Floating-point operations of weight gradients' products: those that W does, and those that I
    does, as a memory setting or ``overlap`` has it, or as an operator makes them with what I needs.

    Args:
        graphs: with all their operators.
    """
    if graphs.backward_weight is None or graphs.backward_input is None:
        return 0, 0
    waiting, handed = _products(_gradients(graphs.backward_weight, ()))
    made = _gradients(graphs.backward_input, handed)
    results = outputs(graphs.backward_input.graph, Kind.INPUT_GRAD)
    urgent = ancestors([value for _, value in results if isinstance(value, fx.Node)])
    early = _products(made)[0] - urgent
    return sum(map(flops, waiting)), sum(map(flops, early))


def _gradients(module: fx.GraphModule, also: Iterable[Role]) -> list[fx.Node]:
    """Weight gradients that a graph returns, and other results."""
    wanted = set(also)
    return [
        value
        for role, value in outputs(module.graph)
        if (role.kind is Kind.PARAMETER_GRAD or role in wanted) and isinstance(value, fx.Node)
    ]


def _products(values: list[fx.Node]) -> tuple[set[fx.Node], set[Role]]:
    """The products that values are sums or views of, and the inputs that they are."""
    found: set[fx.Node] = set()
    handed: set[Role] = set()
    seen: set[fx.Node] = set()
    stack = list(values)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            handed.add(role_of(node))
        elif flops(node):
            found.add(node)
        elif is_view(node) or is_exchange(node) or node.target in _HAND_ON:
            stack += node.all_input_nodes
    return found, handed
