"""Storages and versions of tensors, as autograd and the allocator count them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def versions(tensors: Iterable[Any]) -> tuple[int, ...]:
    """How often each tensor was written in place, as autograd counts it; 0 for numbers."""
    tensors = tuple(tensors)
    try:
        return tuple([tensor._version for tensor in tensors])
    except (AttributeError, RuntimeError):
        # Some kernels return None where their fake promises a tensor (a workspace not needed);
        # an inference tensor has no version, nor has a number.
        counted = [isinstance(t, torch.Tensor) and not t.is_inference() for t in tensors]
        return tuple([t._version if c else 0 for t, c in zip(tensors, counted, strict=True)])


def is_gone(storage: torch.UntypedStorage) -> Callable[[], bool]:
    """Asks, without keeping the storage, whether no tensor lies in it any more."""
    expired: Callable[[], bool] = StorageWeakRef(storage).expired
    return expired


def storage_users(storage: torch.UntypedStorage) -> tuple[int, int]:
    """How many tensors lie in a storage, views included, and how many names Python has for it.

    Both count what the caller itself has; compare with an answer from the same place.
    """
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
