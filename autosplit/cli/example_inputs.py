"""Example inputs of another number of samples."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import PlanError
from autosplit.text.figures import size_text
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten


def resized(inputs: Any, size: int) -> Any:
    """Example inputs with ``size`` samples: repeated or cut along dimension 0.

    Only tensors with as many samples as the first one are; others, such as a mask that all samples
    share, stay as they are.

    Raises:
        PlanError: there is no tensor with samples, or this machine has no room for so many.
    """
    leaves, spec = tree_flatten(inputs)
    count = samples_of(inputs)

    def has(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count

    needed = size * (8 + sum(leaf.nbytes // count for leaf in leaves if has(leaf)))
    if 0.0 < memory_for_trials() < needed:
        raise PlanError(
            f"the inputs of a microbatch of {size:,} samples take {size_text(needed)}, more than "
            f"half of this machine's memory: take a smaller batch, or more microbatches"
        )
    rows = torch.arange(size) % count
    made = [leaf[rows.to(leaf.device)] if has(leaf) else leaf for leaf in leaves]
    return tree_unflatten(made, spec)


def samples_of(inputs: Any) -> int:
    """Of the first tensor among example inputs, along dimension 0.

    Raises:
        PlanError: there is none.
    """
    leaves = tree_flatten(inputs)[0]
    counts = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not counts or not counts[0]:
        raise PlanError(
            "the example inputs hold no tensor with samples along dimension 0, of which a batch "
            "could be made"
        )
    return counts[0]


def memory_for_trials() -> float:
    """Bytes that a rehearsal may take: half of what the machine, or its devices, have."""
    if torch.cuda.device_count():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return sum(each.total_memory for each in devices) / 2
    if not hasattr(os, "sysconf"):
        return 0.0
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2
