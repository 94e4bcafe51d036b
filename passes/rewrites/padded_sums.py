"""Rewrite sums of adjacent zero-padded slices as one concatenation.

The gradient of ``x[:, t]`` is as large as ``x`` and zero except for one slice. A loop over ``t`` (a
scan written in Python), or the two halves of a rotary embedding, adds one such tensor per slice. If
the slices are adjacent, every element of the sum has one term that is not padding, so concatenating
the slices gives the same bits.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
from torch import fx

from ..analysis.operators import OPERATORS, is_plain_sum
from ..graph import SplitGraphs, calls
from .emit import emit, erase

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class _PaddedSlice:
    """A term of a sum that is zero outside one slice along one dimension.

    Attributes:
        padded: the node that pads the slice with zeros to the size of the sum.
        value: the slice, without its dimension if ``is_selected``.
        sizes: sizes of the sum.
    """

    padded: fx.Node
    value: fx.Node
    sizes: list[int]
    dim: int
    start: int
    stop: int
    is_selected: bool


def concatenate_padded_sums(program: SplitGraphs) -> bool:
    """Rewrite sums of adjacent padded slices in the joint graph; True if there was one."""
    graph = program.joint.graph
    tops = [node for node in calls(graph) if is_plain_sum(node) and not _is_inner(node)]
    changed = [_rewrite(graph, top) for top in tops]
    return any(changed)


def _is_inner(node: fx.Node) -> bool:
    """Whether the only reader of a sum is another sum, so that the two form one sum of more
    terms.
    """
    return len(node.users) == 1 and is_plain_sum(next(iter(node.users)))


def _rewrite(graph: fx.Graph, top: fx.Node) -> bool:
    sums, terms = _terms(top)
    slices = [part for term in terms if len(term.users) == 1 and (part := _padded_slice(term))]
    if not slices:
        return False
    dim, _ = Counter(part.dim for part in slices).most_common(1)[0]
    slices = sorted((part for part in slices if part.dim == dim), key=lambda part: part.start)
    padded = {part.padded for part in slices}
    unpadded = [term for term in terms if term not in padded]
    # With two further terms, the order of additions would matter.
    if len(slices) < 2 or len(unpadded) > 1 or not _fit_together(slices):
        return False
    with graph.inserting_before(top):
        result = _concatenated(graph, slices, top)
        if unpadded:
            result = emit(graph, top, aten.add.Tensor, unpadded[0], result)
    if result.meta["val"].stride() != top.meta["val"].stride():
        erase(graph, [*result.all_input_nodes, result])
        return False
    top.replace_all_uses_with(result)
    zeros = [node for term in padded for node in term.all_input_nodes if _is_zeros(node)]
    erase(graph, [*zeros, *padded, *sums])
    return True


def _terms(top: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return (addition nodes of a sum, its terms)."""
    sums, terms, stack = [], [], [top]
    while stack:
        node = stack.pop()
        if node is top or (is_plain_sum(node) and _is_inner(node)):
            sums.append(node)
            stack.extend(node.args)  # type: ignore[arg-type]
        else:
            terms.append(node)
    return sums, terms


def _padded_slice(term: fx.Node) -> _PaddedSlice | None:
    """The slice that a term pads, if its position is known before the graph runs."""
    padding = _padding(term)
    if padding is None:
        return None
    value, sizes, dim, place = padding
    selected = not isinstance(place, slice)
    ends = [place] if selected else [place.start, place.stop, place.step]
    numbers = (*sizes, dim, *(end for end in ends if end is not None))
    if not all(isinstance(number, int) for number in numbers):
        return None
    dim %= len(sizes)
    extent = sizes[dim]
    if selected:
        start = place % extent
        stop, step = start + 1, 1
    else:
        start, stop, step = place.indices(extent)
    if step != 1 or start >= stop:
        return None
    return _PaddedSlice(term, value, list(sizes), dim, start, stop, selected)


def _padding(term: fx.Node) -> tuple[Any, Any, Any, Any] | None:
    """Return (padded value of a term, sizes of the sum, dimension, index or slice); None if the
    term is not padded.
    """
    arguments: Any = term.args
    if term.target is aten.select_backward.default:
        value, sizes, dim, index = arguments
        return value, sizes, dim, index
    if term.target is aten.slice_backward.default:
        value, sizes, dim, *ends = arguments
        return value, sizes, dim, slice(*ends)
    # A decomposition scatters the value into zeros.
    if term.target not in (aten.select_scatter.default, aten.slice_scatter.default):
        return None
    zeros, value, dim, *ends = (*arguments, 0)[: max(len(arguments), 3)]
    if term.kwargs or not isinstance(zeros, fx.Node) or not _is_zeros(zeros):
        return None
    sizes = list(zeros.meta["val"].shape)
    if term.target is aten.select_scatter.default:
        return value, sizes, dim, ends[0]
    return value, sizes, dim, slice(*ends, *[None] * (3 - len(ends)))


def _is_zeros(node: fx.Node) -> bool:
    if node.target is aten.full.default:
        return bool(node.args[1] == 0)
    return node.target in OPERATORS["zeros"]


def _fit_together(slices: list[_PaddedSlice]) -> bool:
    """Whether each slice starts where the one before ends, and together they fill the sum."""
    ends = [0, *(part.stop for part in slices)]
    return ends == [*(part.start for part in slices), slices[0].sizes[slices[0].dim]]


def _concatenated(graph: fx.Graph, slices: list[_PaddedSlice], top: fx.Node) -> fx.Node:
    dim = slices[0].dim
    parts = [
        emit(graph, top, aten.unsqueeze.default, part.value, dim)
        if part.is_selected
        else part.value
        for part in slices
    ]
    return emit(graph, top, aten.cat.default, parts, dim)
