"""Whether W may add into ``.grad`` in place while it runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from autosplit.runtime.activations.saved_tensors import TensorSpec


def inplace_sums(
    parameters: Sequence[Tensor], specs: Sequence[TensorSpec], read: Iterable[Tensor | None]
) -> list[Tensor] | None:
    """The parameters' ``.grad`` as accumulators; None where W must not add into them.

    A graph is compiled for sums of its gradients' own dtype, and may write one sum before it has
    read what the others are made from. So every ``.grad`` must be there, be an ordinary tensor
    that lies as its parameter does, and share no memory with another or with what the graph reads.

    Args:
        parameters: dense ones, that do not overlap themselves.
        specs: their gradients', as they were traced.
        read: what the graph reads; storages are compared whole.
    """
    sums: list[Tensor] = []
    for parameter, spec in zip(parameters, specs, strict=True):
        total = parameter.grad
        if total is None or not _fits(total, parameter, spec):
            return None
        sums.append(total)
    return sums if sums and _apart(sums, read) else None


def _fits(total: Tensor, parameter: Tensor, spec: TensorSpec) -> bool:
    return (
        type(total) is Tensor
        and total.layout is torch.strided
        and total.dtype is spec.dtype
        and total.shape == spec.shape
        and total.stride() == parameter.stride()
        and total.device == spec.device
        and not total.requires_grad
        and not total.is_inference()
    )


def _apart(sums: Iterable[Tensor], read: Iterable[Tensor | None]) -> bool:
    """Whether no sum overlaps another one, or a tensor that is read."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in sums if t.nbytes)
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        return False
    starts = [start for start, _ in spans]
    for storage in (tensor.untyped_storage() for tensor in read if tensor is not None):
        begin = storage.data_ptr()
        before = bisect_left(starts, begin + storage.nbytes())
        if before and spans[before - 1][1] > begin:
            return False
    return True
