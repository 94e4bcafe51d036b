"""W of several microbatches as one graph, whose products run once over the factors of all of them.

The sum of products over microbatches is the product of the concatenated factors (arXiv 2405.18047,
section 3)::

    sum(a[j] @ b[j] for j in microbatches) == cat(a, 1) @ cat(b, 0)

A product of few rows spends its time on reading and writing the gradient; one product over all rows
reads and writes it once. The gradient of a convolution's weight is a sum over samples, too; its
rows are the positions of the outputs of all samples. Everything else runs once for each microbatch,
in order. Factors are concatenated just before their first product, so copies of one layer's factors
are alive at a time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import is_view
from ..analysis.operators import OPERATORS, is_effect, is_exchange, is_plain_sum, is_random
from ..graph import (
    BACKWARD_WRITE,
    SUBGRAPH,
    Role,
    SplitGraphs,
    computed_outputs,
    concrete,
    copy_placeholder,
    is_state,
    module_like,
    outputs,
    placeholders,
    role_of,
    set_outputs,
)
from ..partition.extract import copy_behind
from ..rewrites.emit import emit
from ..subgraph import Subgraph, call_subgraph, inner_calls, operands, subgraph_of
from .accumulate import last_work
from .forms import Changed, GraphForm
from .fuse import JOINED

aten = torch.ops.aten

_SUMMED: Mapping[Any, tuple[int, ...]] = {
    aten.mm.default: (1, 0),
    aten.bmm.default: (2, 1),
    aten.sum.dim_IntList: (0,),
    aten.convolution_backward.default: (0, 0),
}
"""Operator -> the dimension over which it sums, in each factor: the rows of a microbatch, or the
samples."""


def joinable_count(module: fx.GraphModule, rows: int) -> int:
    """The number of operators that run once if several microbatches share one run of W.

    The number is 0 if no product is joined, or if W must run once a microbatch: W has effects,
    random numbers, exchanges between ranks, or state that it writes.
    """
    nodes = [*inner_calls(module.graph)]
    is_ordered = any(is_effect(node) or is_random(node) or is_exchange(node) for node in nodes)
    if is_ordered or outputs(module.graph, *BACKWARD_WRITE):
        return 0
    joined = [node.target for node in nodes if sums_few_rows(node, rows)]
    only_sums = {aten.sum.dim_IntList}.issuperset(joined)
    return 0 if only_sums else len(joined)


def sums_few_rows(node: fx.Node, rows: int) -> bool:
    """Whether the operator is a product or a sum over at most ``rows`` rows of a microbatch."""
    if node.target not in _SUMMED:
        return False
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    if node.target is aten.convolution_backward.default:
        samples, _, *positions = map(concrete, shape)
        computes_input_grad = node.args[-1][0]  # type: ignore[index]
        return not computes_input_grad and math.prod([samples, *positions]) <= rows
    if node.target is aten.sum.dim_IntList and [*node.args[1:]] != [[0]]:
        return False
    return concrete(shape[_SUMMED[node.target][0]]) <= rows


def join_microbatches(program: SplitGraphs, form: GraphForm) -> Changed:
    """Graph pass: W of ``form.count`` microbatches, which returns weight gradients summed over the
    microbatches. ``joinable_count`` must not be 0 for W.

    The inputs are the deferred values of the first microbatch, of the second, and so on, with the
    roles of ``joined_role``; then parameters and buffers, once.
    """
    module = program.graphs()[form.graph]
    return {form.graph: _Joined(module, form.count, form.rows).run()}


def joined_role(role: Role, microbatch: int) -> Role:
    """The role of one microbatch's value as an input of a joined graph: ``name@microbatch``."""
    return Role(role.kind, f"{role.name}@{microbatch}")


class _Joined:
    """A joined graph while it is built.

    Args:
        module: W of one microbatch, or a graph that it calls.
        count: the number of microbatches.
        rows: products with more rows a microbatch are not joined.
        is_called: whether other graphs call this graph; then parameters, too, are inputs once for
            each microbatch.
    """

    def __init__(
        self, module: fx.GraphModule, count: int, rows: int, *, is_called: bool = False
    ) -> None:
        self._module, self._count, self._rows = module, count, rows
        self._graph = fx.Graph()
        self._copies: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count)]
        self._totals: dict[fx.Node, fx.Node] = {}
        self._concatenated: dict[Hashable, fx.Node] = {}
        self._variants: dict[Subgraph, Subgraph] = {}
        self._only_summed = _only_summed(module.graph)
        nodes = placeholders(module.graph)
        shared = [] if is_called else [node for node in nodes if is_state(node)]
        for at, copies in enumerate(self._copies):
            for node in nodes:
                if node not in shared:
                    role = joined_role(role_of(node), at)
                    copies[node] = copy_placeholder(self._graph, node, role)
        for node in shared:
            copy = copy_placeholder(self._graph, node)
            for copies in self._copies:
                copies[node] = copy

    def run(self) -> fx.GraphModule:
        """Build the graph; sums are computed in the order in which W computes the gradients."""
        results = outputs(self._module.graph)
        order = {node: index for index, node in enumerate(self._module.graph.nodes)}
        values = dict.fromkeys(value for _, value in computed_outputs(self._module.graph))

        def completion(value: fx.Node) -> int:
            work = last_work(value, order)
            return -1 if work is None else order[work]

        totals = {value: self._total(value) for value in sorted(values, key=completion)}
        set_outputs(self._graph, results, totals)
        return module_like(self._module, self._graph, f"of_{self._count}_microbatches")

    def _total(self, node: fx.Node) -> fx.Node:
        """The sum of a node's values over the microbatches."""
        if node not in self._totals:
            self._totals[node] = self._sum(node)
        return self._totals[node]

    def _sum(self, node: fx.Node) -> fx.Node:
        call = partial(emit, self._graph, node, node.target)
        operand: Any = node.args[0] if node.args else None
        if node in self._only_summed:
            if _is_linear_view(node):
                return call(self._total(operand), *node.args[1:], **node.kwargs)
            if is_plain_sum(node):
                return call(*map(self._total, node.args))  # type: ignore[arg-type]
            is_item = node.target is operator.getitem
            if is_item and self._only_summed.issuperset(operand.users):
                if subgraph_of(node) is not None:
                    return self._item(operand, node.args[1])  # type: ignore[arg-type]
                if sums_few_rows(operand, self._rows):
                    self._totals |= self._items(operand)
                    return self._totals[node]
            if sums_few_rows(node, self._rows):
                return self._product(node, like=node)
        total = self._copy(node, 0)
        for at in range(1, self._count):
            total = emit(self._graph, node, aten.add.Tensor, total, self._copy(node, at))
        return total

    def _product(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """An operator of ``_SUMMED`` over the rows of all microbatches, with the origin of the node
        ``like``.
        """
        dims = _SUMMED[node.target]
        factors = map(self._concatenate, node.args, dims)  # type: ignore[arg-type]
        rest = fx.map_arg(node.args[len(dims) :], lambda operand: self._copy(operand, 0))
        product = emit(self._graph, like, node.target, *factors, *rest, **node.kwargs)
        product.meta[JOINED] = True
        return product

    def _items(self, call: fx.Node) -> dict[fx.Node, fx.Node]:
        """The results of a convolution's backward over the rows of all microbatches."""
        product = self._product(call, like=next(iter(call.users)))
        return {i: emit(self._graph, i, i.target, product, i.args[1]) for i in call.users}

    def _concatenate(self, node: fx.Node, dim: int) -> fx.Node:
        """Concatenate a factor of all microbatches along its rows. A transposed factor is
        concatenated before the transpose, which copies whole rows.
        """
        axes = _axes(node)
        if axes is not None:
            inner = self._concatenate(node.args[0], axes[dim])  # type: ignore[arg-type]
            return emit(self._graph, node, node.target, inner, *node.args[1:])
        key = _identity(node), dim
        if key not in self._concatenated:
            copies = [self._copy(node, at) for at in range(self._count)]
            self._concatenated[key] = emit(self._graph, node, aten.cat.default, copies, dim)
        return self._concatenated[key]

    def _item(self, call: fx.Node, place: int) -> fx.Node:
        """One result of a subgraph's call, summed over the microbatches. The subgraph is itself
        joined, and called once for all microbatches.
        """
        called = call.meta[SUBGRAPH]
        if called not in self._variants:
            module = _Joined(called.module, self._count, self._rows, is_called=True).run()
            self._variants[called] = Subgraph.of(f"{called.name}_of_{self._count}", module)
        arguments = [
            self._copy(operand, at) for at in range(self._count) for operand in operands(call)
        ]
        items = {item.args[1]: item for item in call.users}
        joined = self._variants[called]
        values = call_subgraph(self._graph, joined, arguments, joined.values)
        self._totals |= {item: values[at] for at, item in items.items()}  # type: ignore[index]
        return values[place]

    def _copy(self, node: fx.Node, at: int) -> fx.Node:
        """A node's value of one microbatch, copied into the joined graph on first use. The results
        of an operator are copied together, so that each can be freed by itself.
        """
        source: Any = node.args[0] if node.target is operator.getitem else None
        for item in (node,) if source is None else source.users:
            copy_behind(self._graph, item, self._copies[at])
        return self._copies[at][node]


def _only_summed(graph: fx.Graph) -> set[fx.Node]:
    """Nodes of which only the sum over microbatches is needed. Such a node is a result, or only
    linear operators lead from it to results.
    """
    nodes: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and all(
            user.op == "output" or (user in nodes and _is_linear(user)) for user in node.users
        ):
            nodes.add(node)
    return nodes


def _is_linear(node: fx.Node) -> bool:
    is_item = node.target is operator.getitem and subgraph_of(node) is not None
    return is_item or is_plain_sum(node) or _is_linear_view(node)


def _is_linear_view(node: fx.Node) -> bool:
    """Whether the node is a view with fixed arguments, so that the view of a sum is the sum of
    views.
    """
    is_item = node.target is operator.getitem
    return is_view(node) and not is_item and node.all_input_nodes == [node.args[0]]


def _identity(node: fx.Node) -> Hashable:
    """A key that equal views of one tensor share."""
    if _is_linear_view(node) and not node.kwargs:
        return _identity(node.args[0]), node.target, str(node.args[1:])  # type: ignore[arg-type]
    return node


def _axes(node: fx.Node) -> list[int] | None:
    """For each dimension of a transposed result, the dimension of the operand; None for other
    nodes.
    """
    if node.target not in OPERATORS["permutes"]:
        return None
    axes = [*range(node.meta["val"].dim())]
    rest: Any = node.args[1:]
    if node.target is aten.permute.default:
        return [axes[axis] for axis in rest[0]]
    if len(axes) > 1:
        first, second = rest or (0, 1)
        axes[first], axes[second] = axes[second], axes[first]
    return axes
