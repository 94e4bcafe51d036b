"""The most bytes of tensors that one call holds at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from autosplit.torch_internals.allocations import HostAllocations
from autosplit.torch_internals.storage import distinct_storage_bytes


def peak_bytes(call: Callable[[], Any], resident: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of ``resident`` tensors plus the peak of what ``call`` allocates.

    On CUDA the allocator's own peak. On the CPU torch keeps none, so the profiler's record of
    every allocation and release is added up; the call is slower meanwhile, not larger.

    Args:
        call: what to measure; it should release what it allocates.
        resident: tensors that exist throughout (parameters, optimizer state).
        device: where the call runs.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        grown = torch.cuda.max_memory_allocated(device) - before
    else:
        with HostAllocations() as allocations:
            allocations.mark()
            call()
        grown = allocations.stretches()[0].highest
    return distinct_storage_bytes(resident) + grown
