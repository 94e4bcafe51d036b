"""Products that add into the accumulators of weight gradients.

::

    exact                                  fused
    gradient = a @ b                       accumulator.addmm_(a, b)
    accumulator.add_(gradient)

The exact form writes the gradient, reads it again, and reads and writes the accumulator. The fused
form reads and writes the accumulator only, and allocates nothing. An embedding gains more: its
gradient is as large as its table, and the rows that are added to the table are few.

The first microbatch of a step may write its gradient into memory that is not initialized. Then the
product is written there: ``accumulator.addmm_(a, b, beta=0)``.

A product is found through transposes between it and its accumulator, which are applied to the
accumulator instead. A sum of several products, as of a tied weight, is taken apart: each product is
added to the accumulator separately. Fused additions round differently from the addition of whole
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ..analysis.operators import OPERATORS, is_plain_sum
from ..graph import Kind, concrete, inputs, tensor_of
from ..rewrites.emit import eliminate_dead_code, emit
from ..subgraph import inner_calls, subgraphs

aten = torch.ops.aten

JOINED = "joined"
"""Key in the ``meta`` of an operator that runs once for several microbatches, see ``join``."""


def fuse(module: fx.GraphModule, wanted: Callable[[fx.Node], bool]) -> bool:
    """Replace operators that compute gradients by operators that add them into the accumulators;
    True if any was replaced. Subgraphs are included.

    Args:
        module: a graph that ``accumulate`` returned; changed in place.
        wanted: whether to replace an operator that can be replaced.
    """
    changed = False
    for called in subgraphs(module.graph):
        changed |= fuse(called.module, wanted)
    accumulators = {*inputs(module.graph, Kind.ACCUMULATOR).values()}
    for node in (n for t in _WRITES for n in module.graph.find_nodes(op="call_function", target=t)):
        accumulator, gradient = node.args
        if accumulator not in accumulators:  # state that a user's backward adds to
            continue
        terms, is_first = [*_terms(gradient)], node.target is aten.copy_.default
        fused = [_is_fusible(term, accumulator) and wanted(term) for term, _ in terms]
        is_product = len(terms) == 1 and terms[0][0].target in _PRODUCTS
        if not any(fused) or (is_first and not is_product):
            continue
        module.graph.erase_node(node)
        for (term, permutations), adds_itself in zip(terms, fused, strict=True):
            write = _WRITERS[term.target] if adds_itself else _add
            if is_first:
                write = _write_product
            _write(module.graph, accumulator, term, permutations, write)
        changed = True
    if changed:
        eliminate_dead_code(module.graph)
        module.recompile()
    return changed


def fusible_count(module: fx.GraphModule) -> int:
    """The number of operators in a graph that ``fuse`` could replace."""
    return sum(node.target in _WRITERS for node in inner_calls(module.graph))


def _terms(
    value: fx.Node, permutations: Sequence[fx.Node] = ()
) -> Iterator[tuple[fx.Node, Sequence[fx.Node]]]:
    """The terms of a gradient: (term, permutations from the gradient back to the term). A value
    with other readers is one term.
    """
    while value.target in OPERATORS["permutes"] and len(value.users) == 1:
        permutations = [*permutations, value]
        value = value.args[0]  # type: ignore[assignment]
    if is_plain_sum(value) and len(value.users) == 1:
        for operand in value.args:
            yield from _terms(operand, permutations)  # type: ignore[arg-type]
    else:
        yield value, permutations


def _is_fusible(term: fx.Node, accumulator: Any) -> bool:
    """Whether a kernel exists that adds this term to the accumulator. Term and accumulator must
    have one dtype, and nothing else may read the term.
    """
    value, total = tensor_of(term), tensor_of(accumulator)
    if value is None or total is None or value.dtype != total.dtype or len(term.users) > 1:
        return False
    if term.target is aten.embedding_dense_backward.default:
        return _adds_few_rows(*term.args)  # type: ignore[arg-type]
    return term.target in _WRITERS


def _adds_few_rows(
    rows: fx.Node, indices: fx.Node, table_rows: int, padding: int, is_scaled: bool
) -> bool:
    """Whether an embedding's rows take less time to add than its whole gradient.

    Rows are copied to mask those of the padding, so they must be fewer than the table's, see
    benchmarks/accumulation. Rows that are scaled by how often they are read cannot be added.
    """
    count = concrete(indices.meta["val"].numel())
    return not is_scaled and (padding == -1 or 4 * count <= concrete(table_rows))


Write = Callable[[Callable[..., fx.Node], fx.Node, fx.Node], object]


def _write(
    graph: fx.Graph,
    accumulator: fx.Node,
    term: fx.Node,
    permutations: Sequence[fx.Node],
    write: Write,
) -> None:
    """Add a term to the accumulator, directly after the term's operator. The accumulator is first
    permuted to the term's order of dimensions.
    """
    call = partial(emit, graph, term)
    after = term.next
    while after.op == "placeholder":
        after = after.next
    with graph.inserting_before(after):
        for permutation in permutations:
            accumulator = call(permutation.target, accumulator, *_inverse(permutation))
        write(call, accumulator, term)


def _inverse(permutation: fx.Node) -> Sequence[Any]:
    """The arguments of the permutation's operator for the inverse permutation."""
    if permutation.target is not aten.permute.default:
        return permutation.args[1:]
    order: Any = permutation.args[1]
    axes = [axis % len(order) for axis in order]
    return ([axes.index(axis) for axis in range(len(axes))],)


def _add(call: Callable[..., fx.Node], total: fx.Node, term: fx.Node) -> None:
    call(aten.add_.Tensor, total, term)


def _add_product(
    call: Callable[..., fx.Node], total: fx.Node, term: fx.Node, **factors: int
) -> None:
    call(_PRODUCTS[term.target], total, *term.args, **factors)


_write_product = partial(_add_product, beta=0)


def _add_rows(call: Callable[..., fx.Node], total: fx.Node, term: fx.Node) -> None:
    """Add rows to an embedding's table. On CUDA ``index_add_`` adds in no fixed order, while
    ``index_put_`` sorts, as the kernel of the gradient does.
    """
    rows, indices, _, padding, _ = term.args
    width = rows.meta["val"].shape[-1]  # type: ignore[union-attr]
    rows = call(aten.reshape.default, rows, [-1, width])
    indices = call(aten.reshape.default, indices, [-1])
    if padding != -1:  # the row of the padding gets no gradient
        padded = call(aten.unsqueeze.default, call(aten.eq.Scalar, indices, padding), 1)
        rows = call(aten.masked_fill.Scalar, rows, padded, 0)
    if rows.meta["val"].device.type == "cuda":
        call(aten.index_put_.default, total, [indices], rows, True)
    else:
        call(aten.index_add_.default, total, 0, indices, rows)


_WRITES = aten.add_.Tensor, aten.copy_.default
_PRODUCTS: Mapping[Any, Any] = {
    aten.mm.default: aten.addmm_.default,
    aten.bmm.default: aten.baddbmm_.default,
}
_WRITERS: Mapping[Any, Write] = {
    aten.mm.default: _add_product,
    aten.bmm.default: _add_product,
    aten.embedding_dense_backward.default: _add_rows,
}
"""Operator of a gradient -> what adds its result to an accumulator."""
