"""Protocols between lazy gradients and the queues of pending weight gradients behind them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from torch import Tensor


class GradientSource(Protocol):
    """Computes pending weight gradients on demand."""

    def compute_for(self, parameter: Tensor) -> None:
        """Compute every pending microbatch that has a gradient for this parameter."""

    def waiting(self) -> Collection[int]:
        """The parameters (their ``id``) that gradients are pending for."""

    def drop(self, parameters: Collection[int]) -> None:
        """Drop what is pending for these parameters (their ``id``)."""

    def sweep(self) -> None:
        """Drop what is pending for every lazy gradient that was freed."""


class PendingWork(Protocol):
    """Deferred weight gradients of one backward through one graph."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """The parameters that get a gradient."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Those that get a gradient; leaves."""

    @property
    def dense(self) -> bool:
        """Whether all gradients are known to be strided."""

    @property
    def due(self) -> bool:
        """Whether it is to run though nobody wants a gradient of it."""

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        """Tensors that it keeps alive, parameters and buffers left out."""

    def drop(self, parameters: Collection[int]) -> None:
        """Drop the gradients of these parameters (their ``id``)."""


class PendingWorkOwner(GradientSource, Protocol):
    """A source that keeps its pending work in order."""

    def works(self) -> Sequence[PendingWork]:
        """Pending work, oldest first."""

    def forget(self, works: Collection[PendingWork]) -> None:
        """Remove work of which no gradient is wanted any more."""
