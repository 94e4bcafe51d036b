"""Cuts a batch into equal microbatches and holds every step to the same shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.negotiation import TensorMeta

Part: TypeAlias = "Tensor | Sequence[Tensor]"
"""The inputs or the targets of a batch: one tensor or several, samples along dimension 0."""

Batch: TypeAlias = "tuple[Part | None, Part | None]"
"""Inputs and targets. A rank that needs neither, or only one, may leave the other out (None)."""

Microbatches: TypeAlias = "list[list[Tensor]]"


class BatchSplitter:
    """Cuts batches for one rank.

    Whatever a rank passes is checked, also what it does not need, so that a bad batch is an error
    on every rank that sees it.

    Args:
        microbatches: M, into how many microbatches.
        device: where the microbatches go.
        needs_inputs: whether this rank holds the first stage.
        needs_targets: whether this rank holds the last stage.
    """

    def __init__(
        self, microbatches: int, device: torch.device, *, needs_inputs: bool, needs_targets: bool
    ) -> None:
        self._count = microbatches
        self._device = device
        self._needs = {"inputs": needs_inputs, "targets": needs_targets}
        self._agreed: dict[str, list[str]] = {}

    def __call__(self, batch: Batch | None) -> tuple[Microbatches, Microbatches]:
        """Inputs and targets per microbatch; empty lists for what this rank does not need.

        Raises:
            PipelineError: a part is missing, is not made of tensors, cannot be divided, or has
                another shape or dtype than in the first step.
        """
        if batch is None:
            batch = (None, None)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise PipelineError(
                f"a batch is a pair (inputs, targets); got {_kind(batch)}. Either part may be a "
                "tensor or a tuple of tensors"
            )
        return self._split("inputs", batch[0]), self._split("targets", batch[1])

    def _split(self, name: str, part: Part | None) -> Microbatches:
        if part is None:
            if self._needs[name]:
                stage = "first" if name == "inputs" else "last"
                raise PipelineError(
                    f"this rank holds the {stage} stage, which needs the batch's {name}; got None"
                )
            return []
        tensors = self._tensors(name, part)
        self._check_static(name, tensors)
        if not self._needs[name]:
            return []
        pieces = [
            tensor.to(self._device, non_blocking=True).chunk(self._count) for tensor in tensors
        ]
        return [list(row) for row in zip(*pieces, strict=True)]

    def _tensors(self, name: str, part: Part) -> list[Tensor]:
        """The tensors of a part, each with samples that can be divided."""
        tensors: Sequence[object] = part if isinstance(part, tuple | list) else [part]
        checked = []
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise PipelineError(
                    f"the batch's {name} must be a tensor or a tuple of tensors; "
                    f"found a {type(tensor).__name__}"
                )
            rows = len(tensor) if tensor.dim() else 0
            if rows == 0 or rows % self._count:
                fitting = max(rows // self._count, 1) * self._count
                raise PipelineError(
                    f"the batch's {name} have shape {list(tensor.shape)}: {rows} samples along "
                    f"dimension 0 cannot be cut into {self._count} equal microbatches; pass "
                    f"{fitting} or another multiple of {self._count}"
                )
            checked.append(tensor)
        return checked

    def _check_static(self, name: str, tensors: list[Tensor]) -> None:
        now = [str(TensorMeta.of(tensor)) for tensor in tensors]
        first = self._agreed.setdefault(name, now)
        if now != first:
            raise PipelineError(
                f"the batch's {name} are {', '.join(now)}, but were {', '.join(first)} in the "
                "first step: the shapes of a pipeline are static; pad or drop the odd batch, or "
                "build the trainer with shapes=N for N shapes of inputs"
            )


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"
