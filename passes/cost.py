"""What a node costs: operator classes, floating-point operations, bytes."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from .aliasing import is_view
from .graph import calls, tensor_of
from .ops import is_effect, is_random, overload
from .sizes import example, is_size

aten = torch.ops.aten

# Reductions and copies that carry neither the pointwise nor the reduction tag.
_CHEAP = frozenset(
    {
        aten._to_copy.default,
        aten.mean.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.sum_to_size.default,
        aten.var_mean.correction,
        aten.full.default,
        aten.full_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.cat.default,
        aten.stack.default,
        aten.slice_backward.default,
        aten.select_backward.default,
        aten.constant_pad_nd.default,
    }
)


def is_cheap(node: fx.Node) -> bool:
    """Whether the node is a view, pointwise work or a plain reduction.

    Such a node may run on either side of a boundary; matrix products, convolutions,
    scatters and anything unknown stay where reachability puts them.
    """
    if node.target is operator.getitem or is_view(node):
        return True
    op = overload(node)
    if op is None or is_size(node):
        return node.op == "call_function" and tensor_of(node) is None
    if is_random(node) or is_effect(node):
        return False
    return torch.Tag.pointwise in op.tags or torch.Tag.reduction in op.tags or op in _CHEAP


def flops(node: fx.Node) -> int:
    """Floating-point operations of a node by torch's own table (matrix products, attention,
    convolutions; everything else counts 0), as ``torch.utils.flop_counter`` counts them.
    """
    op = overload(node)
    formula = None if op is None else flop_registry.get(op.overloadpacket)
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg(
        (node.args, dict(node.kwargs)), lambda n: example(n.meta.get("val"))
    )
    return int(formula(*args, **kwargs, out_val=example(node.meta.get("val"))))


def graph_flops(graph: fx.Graph) -> int:
    """Floating-point operations of one call of the graph."""
    return sum(flops(node) for node in calls(graph))
