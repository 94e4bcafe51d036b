"""Symbolic sizes as concrete numbers, without guards.

A graph may be traced for many sizes at once. Prices and counts need one number each; comparing
a symbolic size would add a guard and specialize the graph to that one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

_UNKNOWN = 4096  # stands for a size that only the data decides, such as a count of nonzeros


def concrete(size: int | torch.SymInt) -> int:
    """The size; for a symbolic one, what it was in the example that the graph was traced with."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    from torch.fx.experimental import symbolic_shapes  # imports sympy

    if symbolic_shapes.free_unbacked_symbols(size):
        return _UNKNOWN
    renamed = hasattr(symbolic_shapes, "optimization_hint")  # not in torch 2.11
    hint = getattr(symbolic_shapes, "optimization_hint" if renamed else "size_hint")
    return int(hint(size))


def is_fixed(tensor: torch.Tensor) -> bool:
    """Whether no size is symbolic, so that shapes may be compared."""
    sizes: Sequence[int | torch.SymInt] = tensor.shape
    return not any(isinstance(size, torch.SymInt) for size in sizes)


NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers that a graph computes: of sizes, or read from data (``tensor.item()``)."""


def is_size(node: fx.Node) -> bool:
    """Whether the node yields a symbolic number."""
    return isinstance(node.meta.get("val"), NUMBERS)


def with_concrete_sizes(value: Any) -> Any:
    """A tensor without data and with concrete sizes in place of a symbolic one; numbers for
    symbolic numbers; containers of them likewise; anything else as it is.
    """
    match value:
        case torch.Tensor():
            if is_fixed(value):
                return value
            sizes = [concrete(size) for size in value.shape]
            return torch.empty(sizes, dtype=value.dtype, device="meta")
        case torch.SymInt():
            return concrete(value)
        case torch.SymFloat() | torch.SymBool():
            return 0  # of what is counted, nothing depends on it
        case list() | tuple():
            return type(value)(with_concrete_sizes(item) for item in value)
    return value
