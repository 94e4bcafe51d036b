"""Weight gradients accumulated by autograd's engine, so that hooks on parameters fire."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class EngineWork(Protocol):
    """Deferred weight gradients that the engine can compute and accumulate."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """The parameters that get a gradient, by the names of their gradients."""

    def named_gradients(self) -> Mapping[str, Tensor]:
        """Run W. Gradients by name, of those parameters and maybe of others.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """


def deliver_through_engine(works: Sequence[EngineWork]) -> None:
    """Compute and accumulate in one pass of the engine: a parameter that several of the works have
    a gradient for gets one sum, and its hooks fire once.
    """
    # The engine runs the newest node first: gradients add up in the order of the works.
    targets = [(work, dict(work.named_parameters())) for work in reversed(works)]
    targets = [(work, named) for work, named in targets if named]
    with torch.enable_grad(), _trainable(p for _, named in targets for p in named.values()):
        roots = [
            _WeightGradients.apply(work, list(named), *named.values())  # type: ignore[no-untyped-call]
            for work, named in targets
        ]
        if roots:
            torch.autograd.backward(roots)


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


@contextlib.contextmanager
def _trainable(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Parameters that were frozen since their backward take gradients inside: autograd drops those
    of what does not require one, but the backward that these are from came before the freezing.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
