"""Weight gradients accumulated by autograd's engine, as those of one ``backward()``.

A parameter may have been frozen since the backward that its gradient is of, or have got a hook,
which is to see the gradients of later backwards only. So where it was, the engine accumulates into
a leaf in its place, which has its memory and its ``.grad``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from autosplit.torch_internals.autograd import has_gradient_hooks

from .pending_work import PendingWork


class EngineWork(PendingWork, Protocol):
    """Deferred weight gradients that the engine can compute and accumulate."""

    def named_leaves(self) -> Iterable[tuple[str, Tensor]]:
        """The leaves that get a gradient, by the names of their gradients."""

    def named_gradients(self) -> Mapping[str, Tensor]:
        """Run W. Gradients by name, of those parameters and maybe of others.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """


def deliver_through_engine(works: Sequence[EngineWork], *, hooked: bool = False) -> None:
    """Compute and accumulate in one pass of the engine: a parameter that several of the works have
    a gradient for gets one sum. No hook of a tensor fires.

    Args:
        works: of one backward.
        hooked: whether autograd's nodes of their parameters may have hooks, which are not to fire.
    """
    # The engine runs the newest node first: gradients add up in the order of the works.
    targets = [(work, dict(work.named_leaves())) for work in reversed(works)]
    for work in [work for work, named in targets if work.due and not named]:
        with torch.no_grad():
            work.named_gradients()
    targets = [(work, named) for work, named in targets if named]
    leaves = _Leaves(hooked)
    with torch.enable_grad():
        roots = [
            _WeightGradients.apply(work, list(named), *map(leaves.of, named.values()))  # type: ignore[no-untyped-call]
            for work, named in targets
        ]
        if roots:
            try:
                torch.autograd.backward(roots)
            finally:
                leaves.hand_back()


class _WeightGradients(torch.autograd.Function):
    """A root whose backward is W: the engine hands the gradients straight to the parameters."""

    @staticmethod
    def forward(ctx: Any, work: EngineWork, names: list[str], *parameters: Tensor) -> Tensor:
        ctx.work, ctx.names = work, names
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        work, ctx.work = ctx.work, None
        gradients = work.named_gradients()
        return (None, None, *(gradients[name] for name in ctx.names))


class _Leaves:
    """Leaves that take gradients: parameters, or tensors in their place."""

    def __init__(self, hooked: bool) -> None:
        self._hooked = hooked
        self._replaced: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, parameter: Tensor) -> Tensor:
        """The leaf for a parameter."""
        frozen = not parameter.requires_grad
        if not (frozen or self._hooked or has_gradient_hooks([parameter])):
            return parameter
        if id(parameter) not in self._replaced:
            leaf = parameter.detach().requires_grad_()
            kind = getattr(parameter, "grad_dtype", leaf.dtype)
            if kind is not leaf.dtype:
                leaf.grad_dtype = kind
            leaf.grad = parameter.grad
            self._replaced[id(parameter)] = parameter, leaf
        return self._replaced[id(parameter)][1]

    def hand_back(self) -> None:
        """Let every parameter have the gradient of the leaf in its place."""
        for parameter, leaf in self._replaced.values():
            parameter.grad = leaf.grad
        self._replaced.clear()
