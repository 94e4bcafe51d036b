"""W of several microbatches as one graph, with one matrix product for each parameter.

The sum of products over microbatches is the product of the concatenated factors:
``sum(a[j] @ b[j]) == cat(a, 1) @ cat(b, 0)``, and likewise for batched products and embeddings.
Factors are concatenated where the product is, so that only one layer's are there twice at a
time, and everything before them is computed for each microbatch by itself: there is no batch
dimension to follow through the graph, and statistics of a microbatch stay its own. Gradients
that no such operator makes are added up. So are those of convolutions: concatenating images took
1.6 to 2.4 times as long on the CPU (``benchmarks/split``). Everything rounds differently from
adding whole gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import is_view
from ..graph import (
    STATE,
    Role,
    copy_placeholder,
    is_state,
    module_like,
    output_node,
    outputs,
    placeholders,
    role_of,
    set_outputs,
    tensor_of,
)
from ..rewrites.emit import eliminate_dead_code

aten = torch.ops.aten


def microbatch_role(role: Role, microbatch: int) -> Role:
    """The role that one microbatch's deferred tensor has in the concatenated graph."""
    if role.kind in STATE and microbatch == 0:
        return role  # one copy serves all
    return Role(role.kind, f"{role.name}@{microbatch}")


def concatenate_microbatches(module: fx.GraphModule, count: int) -> fx.GraphModule:
    """A graph that takes what ``count`` microbatches deferred, and parameters and buffers once,
    and returns the sums of their gradients.
    """
    added_up = _added_up(module.graph)
    work = _Batch(count)
    for node in placeholders(module.graph):
        work.take(node)
    for node in placeholders(module.graph):
        if node in added_up:
            work.add_up(node)
    for node in module.graph.nodes:
        if node.op not in {"placeholder", "output"}:
            work.compute(node, node in added_up)
    results = [
        (role, work.total(value) if isinstance(value, fx.Node) else value)
        for role, value in outputs(module.graph)
    ]
    set_outputs(work.graph, results)
    eliminate_dead_code(work.graph)
    return module_like(module, work.graph, f"batch_of_{count}")


def _added_up(graph: fx.Graph) -> set[fx.Node]:
    """Nodes of which only the sum over microbatches is read: gradients, and the operands of the
    sums and views that gradients are.
    """
    end = output_node(graph)
    found = {node for node in graph.nodes if node.users and tensor_of(node) is not None}
    while True:
        kept = {n for n in found if all(u is end or _takes_sums(u, found) for u in n.users)}
        if kept == found:
            return found
        found = kept


def _takes_sums(node: fx.Node, sums: set[fx.Node]) -> bool:
    return node in sums and _is_linear(node) and sums.issuperset(node.all_input_nodes)


def _is_linear(node: fx.Node) -> bool:
    """Whether the operator is linear, and of a sum rounds no more than adding does."""
    if is_view(node):
        return True
    return node.target is aten.add.Tensor and not node.kwargs and len(node.all_input_nodes) == 2


def _is_mergeable(node: fx.Node) -> bool:
    if node.target is aten.embedding_dense_backward.default:
        indices = tensor_of(node.args[1])  # type: ignore[arg-type]
        return node.args[4] is False and indices is not None and indices.ndim > 0
    return node.target in _MERGED


class _Batch:
    """The concatenated graph under construction, with a value for each microbatch, or a single one
    where all share it (``shared``) or only the sum is wanted (``sums``).
    """

    def __init__(self, count: int) -> None:
        self.graph = fx.Graph()
        self.count = count
        self.each: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count)]
        self.shared: set[fx.Node] = set()
        self.sums: dict[fx.Node, fx.Node] = {}

    def take(self, node: fx.Node) -> None:
        """A placeholder."""
        role = role_of(node)
        if is_state(node):
            self._share(node, copy_placeholder(self.graph, node))
            return
        for index, copies in enumerate(self.each):
            copies[node] = copy_placeholder(self.graph, node, microbatch_role(role, index))

    def compute(self, node: fx.Node, added_up: bool) -> None:
        read = node.all_input_nodes
        if added_up and read and all(each in self.sums for each in read):
            self.sums[node] = self.graph.node_copy(node, self.sums.__getitem__)
        elif added_up and _is_mergeable(node):
            self.sums[node] = _MERGED[node.target](self, node)
        elif all(each in self.shared for each in read):
            self._share(node, self.graph.node_copy(node, self.each[0].__getitem__))
            if added_up:
                self.add_up(node)
        else:
            for index, copies in enumerate(self.each):
                copies[node] = self.graph.node_copy(node, copies.__getitem__)
                if added_up:
                    self._add(node, index)

    def add_up(self, node: fx.Node) -> None:
        """Sum a value over microbatches, in their order."""
        for index in range(self.count):
            self._add(node, index)

    def total(self, node: fx.Node) -> fx.Node:
        if node not in self.sums:  # a gradient that other work reads for each microbatch
            self.add_up(node)
        return self.sums[node]

    def _add(self, node: fx.Node, index: int) -> None:
        value, before = self.each[index][node], self.sums.get(node)
        self.sums[node] = value if before is None else self.call(aten.add.Tensor, before, value)

    def cat(self, node: Any, axis: int) -> fx.Node:
        """A value of every microbatch, one behind the other. A transposed matrix is concatenated
        as it lies in memory.
        """
        if node.target is aten.t.default:
            return self.call(aten.t.default, self.cat(node.args[0], 1 - axis))
        return self.call(aten.cat.default, [copies[node] for copies in self.each], axis)

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda each: each.meta["val"]))
        return node

    def _share(self, node: fx.Node, copy: fx.Node) -> None:
        self.shared.add(node)
        for copies in self.each:
            copies[node] = copy


def _mm(work: _Batch, node: fx.Node) -> fx.Node:
    a, b = node.args
    return work.call(node.target, work.cat(a, 1), work.cat(b, 0))


def _bmm(work: _Batch, node: fx.Node) -> fx.Node:
    a, b = node.args
    return work.call(node.target, work.cat(a, 2), work.cat(b, 1))


def _embedding(work: _Batch, node: fx.Node) -> fx.Node:
    grad, indices, *settings = node.args
    return work.call(node.target, work.cat(grad, 0), work.cat(indices, 0), *settings)


_MERGED: Mapping[Any, Callable[[_Batch, fx.Node], fx.Node]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.embedding_dense_backward.default: _embedding,
}
