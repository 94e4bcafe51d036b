"""Weight gradients on their way into ``.grad`` through autograd's engine, which runs hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Gradients: TypeAlias = Callable[[], Sequence[Tensor | None]]
"""Computes W: a gradient for each of some parameters."""


def deliver_through_engine(works: Iterable[tuple[Sequence[Tensor], Gradients]]) -> None:
    """Accumulate gradients in one pass of the engine: a parameter that several works have one for
    gets one sum, and its hooks fire once.

    Args:
        works: each with its parameters and what computes their gradients. The engine runs the
            newest first, so gradients add up from the last of them to the first.
    """
    with torch.enable_grad():
        roots = [_Root.apply(compute, *given) for given, compute in works]  # type: ignore[no-untyped-call]
        if roots:
            torch.autograd.backward(roots)


class _Root(torch.autograd.Function):
    """A root whose backward is W: the engine hands the gradients straight to the parameters."""

    @staticmethod
    def forward(ctx: Any, compute: Gradients, *parameters: Tensor) -> Tensor:
        ctx.compute = compute
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        compute, ctx.compute = ctx.compute, None
        return (None, *compute())
