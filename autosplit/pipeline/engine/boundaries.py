"""What crosses between stages: tensors of shapes that the ranks have agreed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autosplit.pipeline.schedule.routes import StageDataflow, StageMessage


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What is agreed on about one tensor; it travels contiguous.

    Attributes:
        shape: its sizes.
        dtype: its element type.
        requires_grad: whether a gradient of the same shape and dtype comes back.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """The meta of a tensor that wants no gradient back."""
        return cls(tensor.shape, tensor.dtype, False)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Boundary = tuple[TensorMeta, ...]
"""The tensors between one stage and the next, in order."""

Dependence = Sequence[Sequence[bool]]
"""Of each output of a stage, for each of its inputs whether that output's gradient gives it one."""


class Boundaries:
    """The agreed boundaries of batches of one shape, in training or in evaluation.

    Boundary s lies after stage s. The last stage's is not crossed: it holds the loss. Training
    knows all before its first step; in evaluation, a rank knows those that have crossed there.

    Attributes:
        known: what each stage puts out.
    """

    def __init__(self) -> None:
        self.known: dict[int, Boundary] = {}
        self._given: dict[tuple[int, int], Sequence[bool]] = {}

    def crossing(
        self, message: StageMessage, dataflow: StageDataflow
    ) -> Sequence[TensorMeta | None]:
        """What is in a message between stages that are known; None for a gradient that is not."""
        boundary, taker = message.boundary, message.taker
        metas = dataflow.select(self.known[boundary], boundary, taker)
        if message.forward:
            return metas
        given = self._given.get((boundary, taker)) or [meta.requires_grad for meta in metas]
        return [meta if is_given else None for meta, is_given in zip(metas, given, strict=True)]

    def settle_gradients(
        self, dependence: Sequence[Dependence | None], dataflow: StageDataflow
    ) -> None:
        """Work out which gradients come back, from the last stage to the first: not every tensor
        that could have one gets one. Of what a stage does not use, and of what it uses only for
        such, none comes back, as under autograd.

        Args:
            dependence: of each stage; None where that is not known: all that are wanted come back.
            dataflow: the dataflow between stages.
        """
        last = len(dependence) - 1
        for stage in range(last, -1, -1):
            come = [stage == last] * len(self.known[stage])
            for target in dataflow.targets(stage):
                taken = dataflow.select(range(len(come)), stage, target)
                for at, is_given in zip(taken, self._given[stage, target], strict=True):
                    come[at] |= is_given
            rows = dependence[stage]
            for source in dataflow.sources(stage):
                metas = dataflow.select(self.known[source], source, stage)
                given = [meta.requires_grad for meta in metas]
                if rows is not None:
                    arrived = [row for row, comes in zip(rows, come, strict=True) if comes]
                    places = dataflow.places(source, stage) or [[at] for at in range(len(metas))]
                    pairs = zip(given, places, strict=True)
                    given = [
                        g and any(row[at] for at in own for row in arrived) for g, own in pairs
                    ]
                self._given[source, stage] = given


def listed(metas: Sequence[TensorMeta | None]) -> str:
    """One part of a batch, in words."""
    return ", ".join("nothing" if each is None else str(each) for each in metas)
