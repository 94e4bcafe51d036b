"""Gradient accumulation inside the graph: each gradient is added where it is computed.

Over several microbatches weight gradients are summed. Returned and added by the caller, all of
them are alive at once, beside the sums. Added here, each dies as soon as it has been computed.
``accumulator.add_(gradient)`` rounds as autograd's own accumulation does.

``fuse_accumulation`` goes on from there, into the operator that computes the gradient.
``accumulator.add_(a @ b)`` writes a gradient, reads it again, and reads and writes the
accumulator; ``accumulator.addmm_(a, b)`` reads and writes the accumulator only. Embeddings gain
more: the gradient is as large as the table, the rows that are scattered into it are not. Sums
of several contributions (tied weights) are taken apart and added one by one. All of this rounds
differently from adding whole gradients.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..analysis.aliasing import is_free
from ..analysis.operators import OPERATORS, is_accumulation
from ..graph import (
    SUBGRAPH,
    Kind,
    Role,
    calls,
    copy_placeholder,
    is_like,
    module_like,
    outputs,
    placeholders,
    set_outputs,
    tensor_of,
)
from ..partition.extract import copy_behind
from ..rewrites.emit import Emit, eliminate_dead_code, emit
from ..subgraph import Subgraph, call_subgraph, operands, subgraph_of, subgraphs


def accumulate(module: fx.GraphModule, dtype: torch.dtype | None = None) -> fx.GraphModule:
    """A graph that takes an accumulator for each parameter's gradient and adds into it in place
    rather than returning the gradient.

    Args:
        module: a graph that returns gradients of parameters.
        dtype: of the accumulators; None where each has its gradient's own.
    """
    results = outputs(module.graph)
    sums = {role: value for role, value in results if _is_sum(role, value)}
    graph = fx.Graph()
    copies = {node: copy_placeholder(graph, node) for node in placeholders(module.graph)}
    totals = {role: _accumulator(graph, role.name, value, dtype) for role, value in sums.items()}
    adding = _calls_that_add(sums)
    items = {sums[role] for roles in adding.values() for role in roles}
    ready = _ready(module.graph, {role: v for role, v in sums.items() if v not in items})
    variants: dict[Subgraph, Subgraph] = {}
    for node in [None, *module.graph.nodes]:
        if node in adding:
            called = variants.setdefault(node.meta[SUBGRAPH], _adding(node.meta[SUBGRAPH], dtype))
            given = [copies[each] for each in operands(node)]
            call_subgraph(graph, called, given, [], [totals[role] for role in adding[node]])
        elif node is not None and node.op not in {"placeholder", "output"} and node not in items:
            copy_behind(graph, node, copies)
        for role in ready[node]:
            copy_behind(graph, sums[role], copies)
            _add_gradient(graph, totals[role], copies[sums[role]])
    kept = [(role, value) for role, value in results if role not in sums]
    set_outputs(graph, kept, copies)
    return module_like(module, graph, "accumulating")


def _calls_that_add(sums: Mapping[Role, fx.Node]) -> dict[fx.Node | None, list[Role]]:
    """Calls of graphs that return such gradients and nothing else, each with their roles in order:
    what is called can add by itself.
    """
    found: dict[fx.Node | None, list[Role]] = {}
    roles = {value: role for role, value in sums.items()}
    for value in roles:
        called = subgraph_of(value)
        items = list(value.args[0].users) if called else []  # type: ignore[union-attr]
        items.sort(key=lambda item: item.args[1])
        alone = all([*item.users] == [*value.users] for item in items)
        if called and alone and len(items) == len(called.values) and {*items} <= roles.keys():
            found[value.args[0]] = [roles[item] for item in items]  # type: ignore[index]
    return found


def _adding(called: Subgraph, dtype: torch.dtype | None) -> Subgraph:
    return Subgraph.of(f"{called.name}_accumulating", accumulate(called.module, dtype))


def _ready(
    graph: fx.Graph, sums: Mapping[Role, fx.Node]
) -> Mapping[fx.Node | None, Sequence[Role]]:
    """Behind which node each gradient is added."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    found: dict[fx.Node | None, list[Role]] = defaultdict(list)
    for role, value in sums.items():
        found[_last_work(value, order)].append(role)
    return found


def _is_sum(role: Role, value: object) -> bool:
    return role.kind is Kind.PARAMETER_GRAD and isinstance(value, fx.Node)


def _accumulator(
    graph: fx.Graph, name: str, gradient: fx.Node, dtype: torch.dtype | None
) -> fx.Node:
    node = graph.placeholder(re.sub(r"\W", "_", f"sum_{name}"))
    node.target = node.name
    value = tensor_of(gradient)
    node.meta["val"] = None if value is None else value.new_empty(value.shape, dtype=dtype)
    node.meta["role"] = Role(Kind.ACCUMULATOR, name)
    return node


def _last_work(value: fx.Node, order: dict[fx.Node, int]) -> fx.Node | None:
    """The last operator that the value needs besides views; None if it needs none.

    A view of a gradient may stand far behind the gradient in the graph, and would keep it
    alive until there.
    """
    roots: set[fx.Node] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if is_free(node):
            stack.extend(node.all_input_nodes)
        elif node.op != "placeholder":
            roots.add(node)
    return max(roots, key=order.__getitem__, default=None)


def _add_gradient(graph: fx.Graph, accumulator: fx.Node, gradient: fx.Node) -> None:
    node = graph.call_function(torch.ops.aten.add_.Tensor, (accumulator, gradient))
    node.meta = {key: v for key, v in gradient.meta.items() if key == "stack_trace"}
    node.meta["val"] = accumulator.meta["val"]


aten = torch.ops.aten


def fuse_accumulation(graph: fx.Graph) -> bool:
    """Rewrite the additions of an accumulating graph (see ``accumulate``), and of those that it
    calls; True if any was.
    """
    changed = False
    for called in subgraphs(graph):
        if fuse_accumulation(called.module.graph):
            called.module.recompile()
            changed = True
    for node in [node for node in calls(graph) if is_accumulation(node)]:
        accumulator, gradient = node.args
        if not isinstance(accumulator, fx.Node) or not isinstance(gradient, fx.Node):
            continue
        parts = list(contributions(gradient))
        if len(parts) == 1 and not _is_fusible(parts[0][0], accumulator):
            continue
        graph.erase_node(node)
        for maker, permutations in parts:
            _write(graph, accumulator, maker, permutations)
        changed = True
    if changed:
        eliminate_dead_code(graph)
    return changed


def contributions(
    value: fx.Node, permutations: Sequence[fx.Node] = ()
) -> Iterator[tuple[fx.Node, Sequence[fx.Node]]]:
    """The terms of a gradient: the node that makes each, and the permutations from there to the
    gradient, the last first. A value with other readers is one term.
    """
    while value.target in OPERATORS["permutes"] and len(value.users) == 1:
        permutations = [*permutations, value]
        value = value.args[0]  # type: ignore[assignment]
    is_sum = value.target is aten.add.Tensor and not value.kwargs and len(value.users) == 1
    if is_sum and all(is_like(part, value) for part in value.args):
        for part in value.args:
            yield from contributions(part, permutations)  # type: ignore[arg-type]
    else:
        yield value, permutations


def _is_fusible(maker: fx.Node, accumulator: fx.Node) -> bool:
    mine, into = tensor_of(maker), tensor_of(accumulator)
    if mine is None or into is None or mine.dtype != into.dtype or len(maker.users) > 1:
        return False
    if maker.target is aten.embedding_dense_backward.default:
        return maker.args[4] is False  # not scaled by how often an index occurs
    return maker.target in _WRITERS


def _write(
    graph: fx.Graph, accumulator: fx.Node, maker: fx.Node, permutations: Sequence[fx.Node]
) -> None:
    """Add one contribution, where it is made, to the accumulator seen as the maker sees it."""
    call = functools.partial(emit, graph, maker)
    write = _WRITERS[maker.target] if _is_fusible(maker, accumulator) else _add
    behind = maker.next
    while behind.op == "placeholder":
        behind = behind.next
    with graph.inserting_before(behind):
        into = accumulator
        for each in permutations:
            into = _undo(call, each, into)
        write(call, into, maker)


def _undo(emit: Emit, permutation: fx.Node, into: fx.Node) -> fx.Node:
    """The accumulator as it looks from before a permutation of its gradient."""
    if permutation.target is not aten.permute.default:
        return emit(permutation.target, into, *permutation.args[1:])
    order: Any = permutation.args[1]
    places = [axis % len(order) for axis in order]
    return emit(permutation.target, into, [places.index(axis) for axis in range(len(order))])


def _add(emit: Emit, into: fx.Node, maker: fx.Node) -> None:
    emit(aten.add_.Tensor, into, maker)


def _mm(emit: Emit, into: fx.Node, maker: fx.Node) -> None:
    emit(aten.addmm_.default, into, *maker.args)


def _bmm(emit: Emit, into: fx.Node, maker: fx.Node) -> None:
    emit(aten.baddbmm_.default, into, *maker.args)


def _embedding(emit: Emit, into: fx.Node, maker: fx.Node) -> None:
    """Scatter rows into the table's gradient. On CUDA ``index_add_`` adds in no fixed order,
    while ``index_put_`` sorts as the gradient's own kernel does.
    """
    rows, indices, _, padding, _ = maker.args
    value = rows.meta["val"]  # type: ignore[union-attr]
    rows = emit(aten.reshape.default, rows, [-1, value.shape[-1]])
    indices = emit(aten.reshape.default, indices, [-1])
    if padding != -1:  # the padding's row gets no gradient
        padded = emit(aten.unsqueeze.default, emit(aten.eq.Scalar, indices, padding), 1)
        rows = emit(aten.masked_fill.Scalar, rows, padded, 0)
    if value.device.type == "cuda":
        emit(aten.index_put_.default, into, [indices], rows, True)
    else:
        emit(aten.index_add_.default, into, 0, indices, rows)


_WRITERS: Mapping[Any, Callable[[Emit, fx.Node, fx.Node], None]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.embedding_dense_backward.default: _embedding,
}
