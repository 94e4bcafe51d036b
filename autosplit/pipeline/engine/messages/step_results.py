"""What every rank learns about a step: its losses, and the norm of its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from autosplit.pipeline.engine.faults.first_error import Guard

from .process_groups import Groups, Sum


class Agreement:
    """Losses and gradient norm of a step in flight; having them means that every rank ran it.

    One small sum carries the losses (on ranks without them they are zero) and the norm's
    squares. It is collective, and starts when this is made.

    Args:
        groups: the trainer's process groups.
        guard: the trainer's guard.
        losses: those that this rank has, by microbatch.
        count: how many microbatches there are.
        squares: this rank's share of the squared norm.
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
        squares: float,
        dtype: torch.dtype,
    ) -> None:
        self._guard = guard
        self._dtype = dtype
        numbers = torch.zeros(count + 1, dtype=torch.float64, device="cpu")
        if losses:
            own = torch.stack(tuple(losses.values())).to(numbers)
            numbers[list(losses)] = own
        numbers[count] = squares
        self.behind: Callable[[], None] = lambda: None
        self._sum: Sum = groups.start_sum(numbers)

    def wait(self) -> Tensor:
        """The loss of each microbatch, shape [M], on the CPU.

        Raises:
            RankError: a rank did not get through the step.
        """
        with self._guard("the end of a step"):
            losses = self._sum.wait()[:-1].to(self._dtype)
            self.behind()
        return losses

    def norm(self) -> float:
        """The norm of the model's gradient; waits like ``wait``."""
        with self._guard("the end of a step"):
            return math.sqrt(self._sum.wait()[-1].item())
