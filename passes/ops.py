"""What an operator is, told through torch's public face."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_OVERLOAD: Any = type(torch.ops.aten.mm.default)


def overload(node: fx.Node) -> Any | None:
    """The ``torch.ops`` overload that a node calls, or None for anything else."""
    return node.target if isinstance(node.target, _OVERLOAD) else None


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from a random number generator, or may (attention with dropout)."""
    op = overload(node)
    return op is not None and torch.Tag.nondeterministic_seeded in op.tags


def is_effect(node: fx.Node) -> bool:
    """Whether the node does more than return a value; drawing random numbers is not meant."""
    return node.op == "call_function" and node.is_impure(impure_random=False)
