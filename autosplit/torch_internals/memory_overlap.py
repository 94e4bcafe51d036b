"""Find tensors that overlap in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch._C._dynamo.guards import compute_overlapping_tensors

from autosplit.passes.analysis.aliasing import spanned_elements


def overlaps(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Find the groups of tensors that share elements in memory.

    Args:
        tensors: strided tensors, without duplicates.

    Yields:
        The positions of a group's tensors, two or more.
    """
    spans = sorted([(t.data_ptr(), spanned_bytes(t), at) for at, t in enumerate(tensors)])
    group: list[int] = []
    end = 0
    for start, size, at in spans:
        if start >= end:
            yield from _overlapping(group, tensors)
            group = []
        group.append(at)
        end = max(end, start + size)
    yield from _overlapping(group, tensors)


def spanned_bytes(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return tensor.itemsize * spanned_elements(tensor.shape, tensor.stride())


def _overlapping(group: list[int], tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Find the tensors that share elements, in a group with overlapping spans. Columns of one
    matrix only interleave, and share no elements.
    """
    if len(group) < 2:
        return
    members = [tensors[at] for at in group]
    # torch compares offsets in elements, so tensors must have one storage and one dtype.
    if len({(t.untyped_storage().data_ptr(), t.dtype) for t in members}) == 1:
        group = [group[at] for at in sorted(compute_overlapping_tensors(members))]
    if group:
        yield group
