"""W of several microbatches as one graph, with one matrix product for each parameter.

The sum of products over microbatches is the product of the concatenated factors:
``sum(a[j] @ b[j]) == cat(a, 1) @ cat(b, 0)``, and likewise for batched products and embeddings.
Factors are concatenated where the product is, so that only one layer's are there twice at a
time, and everything before them is computed for each microbatch by itself: there is no batch
dimension to follow through the graph, and statistics of a microbatch stay its own. Gradients
that no such operator makes are added up. So are those of convolutions: concatenating images took
1.6 to 2.4 times as long on the CPU. Everything rounds differently from adding whole gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..graph import (
    STATE,
    Role,
    copy_placeholder,
    is_state,
    module_like,
    outputs,
    role_of,
    set_outputs,
    tensor_of,
)
from ..rewrites.emit import eliminate_dead_code, emit
from .accumulate import contributions

aten = torch.ops.aten

_AXES: Mapping[Any, tuple[int, int]] = {
    aten.mm.default: (1, 0),
    aten.bmm.default: (2, 1),
    aten.embedding_dense_backward.default: (0, 0),
}
"""Operator -> along which dimensions its operands are concatenated."""


def microbatch_role(role: Role, microbatch: int) -> Role:
    """The role that one microbatch's deferred tensor has in the concatenated graph."""
    if role.kind in STATE and microbatch == 0:
        return role  # one copy serves all
    return Role(role.kind, f"{role.name}@{microbatch}")


def concatenate_microbatches(module: fx.GraphModule, count: int) -> fx.GraphModule:
    """A graph that takes what ``count`` microbatches deferred, and parameters and buffers once,
    and returns the sums of their gradients.
    """
    results = outputs(module.graph)
    terms = {value: [*contributions(value)] for _, value in results if isinstance(value, fx.Node)}
    makers = {maker for found in terms.values() for maker, _ in found}
    work = _Batch(count)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            work.take(node)
        elif node.op != "output":
            work.compute(node)
        if node in makers:
            work.sum_up(node)
    sums = {value: work.total(found) for value, found in terms.items()}
    set_outputs(work.graph, results, sums)
    eliminate_dead_code(work.graph)
    return module_like(module, work.graph, f"batch_of_{count}")


class _Batch:
    """The concatenated graph under construction: a value for each microbatch, and sums over all."""

    def __init__(self, count: int) -> None:
        self.graph = fx.Graph()
        self._each: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count)]
        self._sums: dict[fx.Node, fx.Node] = {}

    def take(self, node: fx.Node) -> None:
        """A placeholder."""
        shared = copy_placeholder(self.graph, node) if is_state(node) else None
        for at, copies in enumerate(self._each):
            role = microbatch_role(role_of(node), at)
            copies[node] = shared or copy_placeholder(self.graph, node, role)

    def compute(self, node: fx.Node) -> None:
        for copies in self._each:
            copies[node] = self.graph.node_copy(node, copies.__getitem__)

    def sum_up(self, node: fx.Node) -> None:
        """Sum a value over microbatches, in their order or by one operator over all."""
        if _is_mergeable(node):
            axes, operands = _AXES[node.target], node.args
            joined = [self._cat(each, at) for each, at in zip(operands, axes, strict=False)]
            total = emit(self.graph, node, node.target, *joined, *operands[len(axes) :])
        else:
            total, *others = (copies[node] for copies in self._each)
            for other in others:
                total = emit(self.graph, other, aten.add.Tensor, total, other)
        self._sums[node] = total

    def total(self, terms: list[tuple[fx.Node, Sequence[fx.Node]]]) -> fx.Node:
        """The sum of a gradient's contributions."""
        found = []
        for maker, permutations in terms:
            value = self._sums[maker]
            for each in reversed(permutations):
                value = emit(self.graph, each, each.target, value, *each.args[1:])
            found.append(value)
        total, *others = found
        for other in others:
            total = emit(self.graph, other, aten.add.Tensor, total, other)
        return total

    def _cat(self, node: Any, axis: int) -> fx.Node:
        """A value of every microbatch, one behind the other. A transposed matrix is concatenated
        as it lies in memory.
        """
        if node.target is aten.t.default:
            return emit(self.graph, node, node.target, self._cat(node.args[0], 1 - axis))
        return emit(self.graph, node, aten.cat.default, [c[node] for c in self._each], axis)


def _is_mergeable(node: fx.Node) -> bool:
    if len(node.users) > 1:  # what reads a microbatch's own needs that
        return False
    if node.target is aten.embedding_dense_backward.default:
        indices = tensor_of(node.args[1])  # type: ignore[arg-type]
        return node.args[4] is False and indices is not None and indices.ndim > 0
    return node.target in _AXES
