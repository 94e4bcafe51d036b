"""What a step holds at its most beyond parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from autosplit.compare.peak_memory import allocations, peak


def activation_peak(step: Callable[[], Any], modules: Iterable[nn.Module]) -> int:
    """Bytes that a step from no gradients holds at its most, but for what is left as gradients.

    Args:
        step: forward and backward.
        modules: whose gradients; there are none before.
    """
    changes = allocations(step)
    gradients = {
        parameter.grad.untyped_storage().data_ptr()
        for module in modules
        for parameter in module.parameters()
        if parameter.grad is not None
    }
    # The last that was allocated at such an address is the gradient.
    for at in range(len(changes) - 1, -1, -1):
        address, size = changes[at]
        if size > 0 and address in gradients:
            gradients.remove(address)
            changes[at] = (address, 0)
    return peak(size for _, size in changes)
