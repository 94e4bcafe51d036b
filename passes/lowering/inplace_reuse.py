"""In-place buffer reuse: operators that may write their result over an operand that dies in them.

Autograd's engine adds gradients up in place, and models write ``x += y``; in a functional graph
each such sum is a new tensor, which costs memory and, on the CPU, the time to map its pages.
The code that is generated from the graph takes the place back: the graphs themselves stay
functional.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import storage_root
from ..analysis.collectives import is_wait, read_until
from ..analysis.operators import is_effect, overload
from ..analysis.symbolic_sizes import is_fixed
from ..graph import tensor_of

aten = torch.ops.aten

IN_PLACE: Mapping[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.neg.default: aten.neg_.default,
    aten.exp.default: aten.exp_.default,
    aten.rsqrt.default: aten.rsqrt_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.relu.default: aten.relu_.default,
}
"""Operator -> the one that writes into its first operand."""

_COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})

# Operators whose result is memory of its own, besides those tagged as pointwise. Whatever is
# not known to be may hand back an operand, as composite and custom operators do.
_FRESH = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.cat.default,
        aten.select_backward.default,
        aten.slice_backward.default,
        aten.sum.dim_IntList,
        aten.mean.dim,
        aten._softmax_backward_data.default,
    }
)
_FRESH_FIRST = frozenset(
    {
        aten._native_batch_norm_legit_functional.default,
        aten.convolution_backward.default,
        aten.native_batch_norm_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.native_group_norm_backward.default,
    }
)


def reusable_operands(graph: fx.Graph) -> dict[fx.Node, int]:
    """Node -> position of the operand whose memory it may write its result into: one made in
    this graph, as large as the result, that nobody reads afterwards under any name.
    """
    last_read = _last_reads(graph)
    found = {}
    for node in graph.nodes:
        if node.target not in IN_PLACE or node.kwargs:
            continue
        for position in (0, 1) if node.target in _COMMUTATIVE else (0,):
            if _is_free_for(node, position, last_read):
                found[node] = position
                break
    return found


def _last_reads(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The last reader of each storage, by the node that allocates it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        held = read_until(node) if is_wait(node) else []
        last |= dict.fromkeys(map(storage_root, (*node.all_input_nodes, *held)), node)
    return last


def _is_free_for(node: fx.Node, position: int, last_read: Mapping[fx.Node, fx.Node]) -> bool:
    operand = node.args[position]
    if not isinstance(operand, fx.Node):
        return False
    root = storage_root(operand)
    others = [each for each in node.all_input_nodes if each is not operand]
    return (
        last_read[root] is node
        and _is_fresh(root)
        and _fills(operand, root, node)
        and all(storage_root(each) is not root for each in others)
    )


def _is_fresh(root: fx.Node) -> bool:
    if root.target is operator.getitem:
        maker, index = root.args
        first = isinstance(index, int) and index == 0
        return first and isinstance(maker, fx.Node) and maker.target in _FRESH_FIRST
    op = overload(root)
    if op is None or op.namespace != "aten" or is_effect(root):
        return False
    return op in _FRESH or bool(torch.Tag.pointwise in op.tags)


def _fills(operand: fx.Node, root: fx.Node, result: fx.Node) -> bool:
    """Whether the result lies in the operand's memory as it would in its own."""
    mine, base, wanted = tensor_of(operand), tensor_of(root), tensor_of(result)
    if mine is None or base is None or wanted is None:
        return False
    if not all(map(is_fixed, (mine, base, wanted))):
        return False
    if (mine.dtype, mine.device) != (wanted.dtype, wanted.device):
        return False
    alike = (mine.shape, mine.stride()) == (wanted.shape, wanted.stride())
    return alike and mine.numel() == base.numel()
