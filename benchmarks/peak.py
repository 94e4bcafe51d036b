"""The most bytes that a call allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autosplit.torch_internals.allocations import allocations_on

_CPU = torch.device("cpu")


def peak_bytes(call: Callable[[], Any], device: torch.device = _CPU) -> int:
    """The peak of what a call allocates on a device, above what there was.

    On the CPU torch keeps none, so the profiler's record of every allocation and release is added
    up; the call is slower meanwhile, not larger. It should release what it allocates.
    """
    with allocations_on(device) as allocations:
        allocations.mark()
        call()
        allocations.mark()
    return allocations.stretches()[0].highest
