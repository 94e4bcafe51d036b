"""Boundaries between stages: the tensors that cross them, with shapes that the ranks agreed on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from autosplit.pipeline.schedule.routes import StageDataflow, StageMessage


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The agreed shape and dtype of one tensor between stages, which is sent contiguous.

    Attributes:
        shape: the tensor's sizes.
        dtype: the tensor's element type.
        requires_grad: whether a gradient of the same shape and dtype comes back.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """The ``TensorMeta`` of a tensor that needs no gradient."""
        return cls(tensor.shape, tensor.dtype, False)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Boundary = tuple[TensorMeta, ...]
"""The tensors between one stage and the next, in order."""


class NamedLoss(NamedTuple):
    """The result of a last stage whose loss has named parts.

    Attributes:
        loss: the loss.
        parts: scalars without gradient, by name.
    """

    loss: Tensor
    parts: Mapping[str, Tensor]


Dependence = Sequence[Sequence[bool]]
"""For each output of a stage and each of its inputs, whether the gradient of the output gives the
input one; then the inputs that get a gradient even if no output does.
"""


class Boundaries:
    """The agreed boundaries of microbatches of one combination of sizes, in training or evaluation.

    Boundary s is after stage s. The last boundary holds the loss, and no message crosses it. In
    training, ranks know all boundaries before the step, except boundaries after a stage without
    graphs. A rank learns such a boundary, and each boundary in evaluation, from its first message.

    Attributes:
        outputs: by stage, the metadata of the stage's outputs.
        part_names: names of the parts of the loss, which are the last stage's outputs after the
            loss.
        tensors: cache of ``tensors_in``, by ``StageMessage.crossing``.
    """

    def __init__(self) -> None:
        self.outputs: dict[int, Boundary] = {}
        self.part_names: tuple[str, ...] = ()
        self._get_gradient: dict[tuple[int, int], Sequence[bool]] = {}
        self.tensors: dict[tuple[int, int, bool], Sequence[TensorMeta | None]] = {}

    def of_other_sizes(self, outputs: Mapping[int, Boundary]) -> Boundaries:
        """The boundaries of microbatches of other sizes. The same tensors get gradients, until
        ``resolve_gradients`` is called.

        Args:
            outputs: by stage, the metadata of the stage's outputs; unknown outputs are left out.
        """
        other = copy.copy(self)
        other.outputs, other.tensors = dict(outputs), {}
        return other

    def tensors_in(
        self, message: StageMessage, dataflow: StageDataflow
    ) -> Sequence[TensorMeta | None]:
        """Metadata of the tensors in a message over a known boundary; None for a gradient that is
        not sent.
        """
        boundary, taker, forward = crossing = message.crossing
        if crossing in self.tensors:
            return self.tensors[crossing]
        metas = dataflow.select(self.outputs[boundary], boundary, taker)
        flags = self._get_gradient.get((boundary, taker)) or [m.requires_grad for m in metas]
        tensors = [
            meta if forward or is_sent else None for meta, is_sent in zip(metas, flags, strict=True)
        ]
        self.tensors[crossing] = tensors
        return tensors

    def resolve_gradients(
        self, dependence: Sequence[Dependence | None], dataflow: StageDataflow
    ) -> None:
        """Find the gradients that stages send back, from the last stage to the first.

        Not every tensor that requires a gradient gets one. As under autograd, an input gets no
        gradient if the stage does not use it, or uses it only for outputs without a gradient.

        Args:
            dependence: per stage, the inputs that get a gradient from each output. None for a stage
                without graphs, in which every input that requires a gradient gets one.
            dataflow: the dataflow between stages.
        """
        self._get_gradient = {}
        last = len(dependence) - 1
        for stage in range(last, -1, -1):
            output_flags = [stage == last and not at for at in range(len(self.outputs[stage]))]
            for target in dataflow.targets(stage):
                positions = dataflow.select(range(len(output_flags)), stage, target)
                flags = self._get_gradient[stage, target]
                for position, is_sent in zip(positions, flags, strict=True):
                    output_flags[position] |= is_sent
            rows = dependence[stage]
            if rows is not None:
                rows = [row for row, gets in zip(rows, [*output_flags, True], strict=True) if gets]
            for source in dataflow.sources(stage):
                metas = dataflow.select(self.outputs[source], source, stage)
                flags = [meta.requires_grad for meta in metas]
                if rows is not None:
                    places = dataflow.places(source, stage) or [[at] for at in range(len(metas))]
                    flags = [
                        flag and any(row[place] for place in of_input for row in rows)
                        for flag, of_input in zip(flags, places, strict=True)
                    ]
                self._get_gradient[source, stage] = flags
