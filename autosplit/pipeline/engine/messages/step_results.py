"""What every rank learns about a step: its losses, and the squared norms of its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autosplit.pipeline.engine.faults.first_error import Guard

from .control import Sum
from .process_groups import Groups


@dataclass(frozen=True)
class Squares:
    """This rank's squared norms of the parameters' gradients.

    Attributes:
        values: float64, on the CPU.
        first: the place of the first of them among those of all ranks.
        count: how many those are.
    """

    values: Tensor
    first: int
    count: int


class Agreement:
    """Losses and gradient norm of a step in flight; having them means that every rank ran it.

    One small sum over all ranks carries the losses of each pipeline (on ranks without them they are
    zero) and the squares of each parameter, which only one rank adds to each: so they are the same
    bits however parameters lie on ranks. It is collective, and starts when this is made.

    Args:
        groups: the trainer's process groups.
        guard: the trainer's guard.
        losses: those that this rank has, by microbatch.
        count: how many microbatches there are.
        squares: this rank's; None where nobody asks for the norm.
        dtype: the dtype of the losses.

    Attributes:
        behind: what ``wait`` does besides, once every rank has run the step.
    """

    def __init__(
        self,
        groups: Groups,
        guard: Guard,
        losses: Mapping[int, Tensor],
        *,
        count: int,
        squares: Squares | None,
        dtype: torch.dtype,
    ) -> None:
        self._guard = guard
        self._dtype = dtype
        first = groups.layout.replica * count
        self._own = slice(first, first + count)
        self._losses = groups.layout.replicas * count
        size = self._losses + (0 if squares is None else squares.count)
        numbers = torch.zeros(size, dtype=torch.float64, device="cpu")
        if losses:
            own = torch.stack(tuple(losses.values())).to(numbers)
            numbers[self._own][list(losses)] = own
        if squares is not None:
            start = self._losses + squares.first
            numbers[start : start + len(squares.values)] = squares.values
        self.behind: Callable[[], None] = lambda: None
        self._sum: Sum = groups.everybody.start_sum(numbers)

    def wait(self) -> Tensor:
        """The loss of each microbatch, shape [M], on the CPU.

        Raises:
            RankError: a rank did not get through the step.
        """
        with self._guard("the end of a step"):
            losses = self._sum.wait()[self._own].to(self._dtype)
            self.behind()
        return losses

    def norm(self) -> float:
        """The norm of the model's gradient; waits like ``wait``.

        The sum of the squares is exact before it is rounded, so their order does not matter.
        """
        with self._guard("the end of a step"):
            try:
                return math.sqrt(math.fsum(self._sum.wait()[self._losses :].tolist()))
            except OverflowError:
                return math.inf
