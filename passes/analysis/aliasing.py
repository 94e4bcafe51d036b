"""Alias analysis: which nodes share storage, by operator schemas.

Boundaries are counted in bytes of distinct storage: a slice of a large tensor keeps the
whole tensor alive, and ten views of one tensor cost what the tensor costs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..graph import SUBGRAPH, concrete, tensor_of
from .operators import OPERATORS, is_wait, overload


def is_view(node: fx.Node) -> bool:
    """Whether the node is a view of its first argument, free to recompute."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        parent = node.args[0]
        return isinstance(parent, fx.Node) and is_view(parent)
    op = overload(node)
    return op is not None and (op in OPERATORS["view"] or op.is_view)


def is_free(node: fx.Node) -> bool:
    """Whether recomputing the node costs neither time nor memory: a view, or a constant."""
    return node.op == "get_attr" or is_view(node)


def storage_root(node: fx.Node) -> fx.Node:
    """The node that allocated the storage of this node's value."""
    while (owner := _owner(node)) is not None:
        node = owner
    return node


def _owner(node: fx.Node) -> fx.Node | None:
    """An earlier node whose storage this node's value shares, or None."""
    parent = node.args[0] if node.args else None
    if not isinstance(parent, fx.Node):
        return None
    if is_view(node) or is_wait(node):
        return parent
    called = parent.meta.get(SUBGRAPH) if node.target is operator.getitem else None
    owner = called.storage_owners[node.args[1]] if called else None
    if owner is None:
        return None
    is_result, place = owner
    if not is_result:
        return parent.args[1][place]  # type: ignore[index,return-value]
    return next((item for item in parent.users if item.args[1] == place), None)


def producer(node: fx.Node) -> fx.Node:
    """The operator that computed the node's value, found by going back through views and tuple
    items.
    """
    while is_view(node) or node.target is operator.getitem:
        parent = node.args[0]
        if not isinstance(parent, fx.Node):
            break
        node = parent
    return node


def spanned_elements(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Memory positions from the first element of a strided tensor to its last; 0 if it is empty."""
    if not all(sizes):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def storage_bytes(node: fx.Node, size: Callable[[Any], int] = concrete) -> int:
    """Bytes of the storage that the node's value keeps alive.

    Args:
        node: the node.
        size: returns the number for a symbolic size; by default that of the example inputs.
    """
    value = tensor_of(storage_root(node))
    if value is None:
        value = tensor_of(node)
    if value is None:
        return 0
    if value.layout is not torch.strided:  # a sparse gradient counts as if it were dense
        return math.prod(map(size, value.shape)) * value.element_size()
    return size(value.untyped_storage().nbytes())


def distinct_bytes(nodes: list[fx.Node], size: Callable[[Any], int] = concrete) -> int:
    """Bytes of distinct storage that the values of all ``nodes`` together keep alive; see
    ``storage_bytes``.
    """
    return sum(storage_bytes(root, size) for root in {storage_root(node) for node in nodes})


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may share memory, judged by sizes and strides alone. True
    also for some interleaved layouts whose elements do not overlap.
    """
    if tensor.layout is not torch.strided:
        return False
    strides, sizes = map(concrete, tensor.stride()), map(concrete, tensor.shape)
    pairs = sorted(pair for pair in zip(strides, sizes, strict=True) if pair[1] != 1)
    span = 0
    for stride, size in pairs:
        if stride <= span:
            return all(size for _, size in pairs)
        span += stride * (size - 1)
    return False


def fills_storage(node: fx.Node) -> bool:
    """Whether the graph computes the node's value, and the value covers its storage once. A value
    that torch conjugates or negates when it is read differs from its storage.
    """
    value, root = tensor_of(node), storage_root(node)
    if value is None or root.op != "call_function" or overlaps_itself(value):
        return False
    if value.is_conj() or value.is_neg():
        return False
    return storage_bytes(node) == concrete(value.numel()) * value.element_size()
