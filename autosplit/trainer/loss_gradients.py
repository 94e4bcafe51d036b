"""The gradients of a step's losses, with which the backward starts, from weights and scale.

A step trains the weighted mean of the losses over the microbatches of all replicas. With weights
w_m and the scale s of a ``GradScaler``, the gradient of microbatch m's loss is::

    s * w_m / sum(w)        without weights: s / M

Sums and M are means over the replicas, since replicas reduce gradients to their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.groups import Groups

Weight: TypeAlias = "float | Sequence[float | Tensor] | Tensor"
"""The weight of each microbatch, M numbers, or the weight of the batch, one number."""


class StepWeights(NamedTuple):
    """The weights of a step's microbatches.

    Attributes:
        numbers: one for each microbatch, or one for all together.
        length: the number of microbatches that the weights are for; 0 for a single weight.
        refusal: why the weights are refused; empty if they are valid.
    """

    numbers: Sequence[float]
    length: int
    refusal: str = ""

    def of_each(self, count: int) -> Sequence[float]:
        """The weight of each of ``count`` microbatches."""
        return self.numbers if self.length else [self.numbers[0] / count] * count


def step_weights(weight: Weight) -> StepWeights:
    """Return the weights of a step, such as numbers of tokens."""
    values: Any = weight.tolist() if isinstance(weight, Tensor) else weight
    is_row = isinstance(values, list | tuple)
    numbers = values if is_row else [values]
    length = len(numbers) if is_row else 0
    if is_row and not length:
        return StepWeights((), 0, "weight is empty: pass one number for each microbatch")
    for at, number in enumerate(numbers):
        if not _is_weight(number):
            return StepWeights(
                (),
                length,
                f"{f'weight[{at}]' if is_row else 'weight'} is {number!r}: a weight must be a "
                "positive finite number, such as the number of tokens that count in the loss",
            )
    return StepWeights([*map(float, numbers)], length)


def _is_weight(number: Any) -> bool:
    try:
        return not isinstance(number, str | bool) and 0.0 < float(number) < math.inf
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers
        return False


class LossGradients:
    """The gradients of a step's losses.

    Args:
        groups: the trainer's process groups.
        schedule: the schedule, whose placement says which rank computes the losses.
        device: the device of the losses.
        scaler: scales the losses; None: they are not scaled.

    Attributes:
        scale: the scale of the last step.
    """

    def __init__(
        self,
        groups: Groups,
        schedule: Schedule,
        device: torch.device,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._groups, self._device, self._scaler = groups, device, scaler
        self._has_losses = schedule.placement[schedule.stages - 1] == groups.rank
        self.scale = 1.0
        if scaler is not None:
            # A scaler learns from the gradients of an optimizer whether a step was finite.
            self._sentinel = nn.Parameter(torch.zeros((), device=device))
            self._observed = torch.optim.SGD([self._sentinel])
            scaler.scale(torch.zeros((), device=device))  # creates its tensors

    def of_step(
        self,
        dtype: torch.dtype,
        part_names: Sequence[str],
        counts: Sequence[int],
        weights: StepWeights | None = None,
    ) -> list[list[Any]]:
        """Return, for each microbatch, the gradient of its loss, and None for each named part of
        the loss. Collective over replicas if there are weights.

        Args:
            dtype: the dtype of the losses.
            part_names: the names of the parts.
            counts: the number of microbatches of each pipeline.
            weights: the weights of the step, if any.
        """
        if self._scaler is not None:
            self.scale = self._scaler.get_scale()
        count = counts[self._groups.layout.index]
        shares = [len(counts) / sum(counts)] * count
        if weights is not None:
            shares = self._shares_of(weights.of_each(count))
        values = [self.scale * share for share in shares]
        gradients = torch.tensor(values, dtype=dtype, device=self._device).unbind()
        return [[gradient, *[None] * len(part_names)] for gradient in gradients]

    def _shares_of(self, weights: Sequence[float]) -> list[float]:
        """Return ``weight * replicas / total`` of each weight, where ``total`` sums the weights of
        all replicas. The factor ``replicas`` cancels, because replicas reduce gradients to their
        mean.
        """
        layout, total = self._groups.layout, sum(weights)
        if layout.shares > 1:
            number = total if self._has_losses else 0.0  # once for each pipeline
            numbers = torch.tensor([number], dtype=torch.float64, device="cpu")
            total = self._groups.everybody.start_sum(numbers)().item() / len(layout.pipelines)
        return [weight / total for weight in weights]

    def update_scale(self, scaler: torch.amp.GradScaler, *, finite: bool) -> None:
        """Let the scale grow, or shrink after gradients that are not finite.

        Args:
            scaler: the scaler of the losses.
            finite: whether all gradients of the step are finite, on all ranks.
        """
        self._sentinel.grad = torch.full_like(self._sentinel, 0.0 if finite else math.inf)
        scaler.unscale_(self._observed)
        scaler.update()
