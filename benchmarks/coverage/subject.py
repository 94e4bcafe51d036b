"""What is examined: a module, inputs for it, and a loss on its output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Call = tuple[tuple[Any, ...], dict[str, Any]]
Loss = Callable[[Any, torch.Generator], Tensor]


def projection(output: Any, generator: torch.Generator) -> Tensor:
    """The sum of every differentiable output times random weights: every element of every
    output gets a gradient of its own.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    terms = [_weighted(leaf, generator) for leaf in leaves if leaf.requires_grad]
    if not terms:
        raise NothingToDifferentiateError("no output requires a gradient")
    return torch.stack(terms).sum()


def _weighted(output: Tensor, generator: torch.Generator) -> Tensor:
    dense = output if output.layout is torch.strided else output.to_dense()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    # Drawn in one precision, so that a float64 reference has the weights of the float32 run.
    weights = torch.randn(real.shape, generator=generator, dtype=torch.float32)
    return (real * weights.to(real.dtype)).sum().to(torch.float64)


class NothingToDifferentiateError(Exception):
    """A subject that has no backward under plain autograd."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """One module with inputs, in the state (dtype, train or eval) it is examined in.

    Attributes:
        name: names the row.
        build: makes the module; called under a fixed seed.
        call: makes the arguments of one microbatch, called under a seed of its own. Floating
            tensors among them that require a gradient are compared for theirs.
        loss: scalar of the module's output.
        kept: what the loss reads of the module besides; None where that is nothing.
    """

    name: str
    build: Callable[[], nn.Module]
    call: Callable[[], Call]
    loss: Loss = projection
    kept: Callable[[Any], Any] | None = None
