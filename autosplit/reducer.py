"""DistributedDataParallel around a split module: when its reducer takes part."""

from __future__ import annotations

import torch

from .compat import data_parallel


def synchronises() -> bool:
    """Whether a forward of DistributedDataParallel is under way whose backward is to average
    gradients over the ranks: outside ``no_sync()``.

    The reducer takes the next gradient that arrives at every parameter, once, and waits for the
    other ranks. So that backward computes weight gradients too, after everything that is pending:
    deferred, they would be averaged where each rank happens to use them first.
    """
    wrapper = data_parallel() if torch.is_grad_enabled() else None
    return wrapper is not None and bool(wrapper.require_backward_grad_sync)
