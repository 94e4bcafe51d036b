"""Whether W may add into ``.grad`` in place while it runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from autosplit.runtime.residuals import TensorSpec
from autosplit.torch_internals.dtensor import Sharding, is_dtensor, local_tensor


def inplace_sums(
    parameters: Sequence[Tensor],
    specs: Sequence[TensorSpec],
    lying: Sequence[Sharding | None],
    read: Iterable[Tensor | None],
) -> list[Tensor] | None:
    """The parameters' ``.grad`` as accumulators; None where W must not add into them.

    A graph is compiled for sums of its gradients' own dtype, and may write one sum before it has
    read what the others are made from. So every ``.grad`` must be there, be an ordinary tensor
    that lies as its parameter does, and share no memory with another or with what the graph reads.
    One that is a DTensor must lie over ranks as the graph's gradient does.

    Args:
        parameters: dense ones, that do not overlap themselves.
        specs: their gradients', as they were traced.
        lying: how their gradients lie over ranks, None for those that are no DTensors.
        read: what the graph reads; storages are compared whole.
    """
    sums: list[Tensor] = []
    for parameter, spec, lies in zip(parameters, specs, lying, strict=True):
        total = parameter.grad
        if total is None or not _lies(total, lies):
            return None
        if not _fits(local_tensor(total), local_tensor(parameter), spec):
            return None
        sums.append(total)
    return sums if sums and _apart([*map(local_tensor, sums)], read) else None


def note_written(sums: Sequence[Tensor]) -> None:
    """Count a write into each sum, as what added to it may be compiled, which does not."""
    increment_version([*sums, *(local_tensor(each) for each in sums if is_dtensor(each))])


def _lies(total: Tensor, lies: Sharding | None) -> bool:
    """Whether a sum lies over ranks as a gradient does, or both are of this rank alone."""
    if lies is None:
        return not is_dtensor(total)
    return is_dtensor(total) and Sharding.of(total) == lies


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
