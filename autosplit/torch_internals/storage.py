"""Storages of tensors: version counters, lifetimes, reference counts and bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .dtensor import local_tensor


def versions(tensors: Iterable[Any]) -> tuple[int, ...]:
    """Autograd's version counter of each tensor; 0 for numbers."""
    tensors = tuple(tensors)
    try:
        # A number has no version, nor has a None that stands for a tensor.
        return tuple([getattr(tensor, "_version", 0) for tensor in tensors])
    except RuntimeError:
        # Some kernels return None where their fake promises a tensor (a workspace not needed);
        # an inference tensor has no version, nor has a number.
        counted = [isinstance(t, torch.Tensor) and not t.is_inference() for t in tensors]
        return tuple([t._version if c else 0 for t, c in zip(tensors, counted, strict=True)])


_OTHER_MEMORY = "_autosplit_other_memory"


def allow_other_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Note that the owner of these tensors frees their memory and takes other memory for the same
    values.
    """
    for tensor in tensors:
        setattr(tensor, _OTHER_MEMORY, True)


def allows_other_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor may lie elsewhere than before, with the same values."""
    return hasattr(tensor, _OTHER_MEMORY)


def is_gone(storage: torch.UntypedStorage) -> Callable[[], bool]:
    """A function that tells, without keeping the storage alive, whether it was freed."""
    expired: Callable[[], bool] = StorageWeakRef(storage).expired
    return expired


def storage_users(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Reference counts of a storage: by tensors, views included, and by Python.

    Both count the caller's own references; compare with an answer from the same place.
    """
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def storage_sizes(
    tensors: Iterable[torch.Tensor | None],
) -> dict[tuple[torch.device, int], int]:
    """Bytes of each storage behind the tensors, by where it lies; of sparse ones, the parts',
    of DTensors, what this rank has."""
    storages = (part.untyped_storage() for tensor in tensors for part in _strided_parts(tensor))
    return {(each.device, each.data_ptr()): each.nbytes() for each in storages}


def distinct_storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of distinct storage behind the tensors."""
    return sum(storage_sizes(tensors).values())


def _strided_parts(tensor: torch.Tensor | None) -> list[torch.Tensor]:
    if tensor is None:
        return []
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [local_tensor(tensor)]
