"""What crosses between stages: tensors of shapes that the ranks have agreed on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autosplit.errors import PipelineError

from .first_error import LostPeerError
from .groups import Groups

_LOOK_EVERY = 0.005


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


class Negotiation:
    """The agreed boundaries of one mode of running ("train", "evaluate").

    Boundary s lies after stage s. The last stage's is not crossed: it holds the loss, which every
    rank wants to know about.

    Attributes:
        known: the boundaries that this rank knows so far.
    """

    def __init__(self, mode: str, groups: Groups, check: Callable[[], None]) -> None:
        self._mode = mode
        self._groups = groups
        self._check = check
        self.known: dict[int, Boundary] = {}

    def publish(self, boundary: int, metas: Sequence[TensorMeta]) -> Boundary:
        """Settle a boundary; every rank that holds the stage before it does so.

        Raises:
            PipelineError: another rank that holds a copy of the stage has settled on other tensors.
        """
        agreed = self.known[boundary] = tuple(metas)
        if self._groups.ranks > 1:
            text = _text(agreed)
            first = self._groups.store.compare_set(self._key(boundary), "", text).decode()
            if first != text:
                raise PipelineError(
                    f"stage {boundary} puts out {listed(agreed)} here and "
                    f"{listed(_metas(first))} on the rank of its other copy: give "
                    "both the same batch"
                )
        return agreed

    def learn(self, boundary: int) -> Boundary:
        """Wait until ``boundary`` is settled.

        Raises:
            LostPeerError: another rank failed, or a stage was not ready within the timeout. Stages
                become ready one after another; each has the whole timeout.
        """
        if boundary not in self.known:
            for stage in range(boundary + 1):
                if stage not in self.known:
                    self._await(stage)
            self.known[boundary] = _metas(self._groups.store.get(self._key(boundary)))
        return self.known[boundary]

    def _await(self, stage: int) -> None:
        store, timeout = self._groups.store, self._groups.timeout
        deadline = time.monotonic() + timeout
        with self._groups.place.waits():
            while not store.check([self._key(stage)]):
                self._check()
                if time.monotonic() > deadline:
                    waited = f"waited {timeout:.3g} s for stage {stage} to be built"
                    raise LostPeerError(
                        f"{waited}: is that rank stuck? A longer timeout= leaves more time for "
                        "building",
                        waited,
                    )
                time.sleep(_LOOK_EVERY)

    def _key(self, stage: int) -> str:
        return f"autosplit/{self._mode}/{stage}/built"


def _text(metas: Boundary) -> str:
    return json.dumps([(meta.shape, str(meta.dtype), meta.requires_grad) for meta in metas])


def _metas(text: str | bytes) -> Boundary:
    return tuple(
        TensorMeta(torch.Size(shape), getattr(torch, dtype.removeprefix("torch.")), wants)
        for shape, dtype, wants in json.loads(text)
    )


def listed(metas: Sequence[TensorMeta | None]) -> str:
    """One part of a batch, in words."""
    return ", ".join("nothing" if each is None else str(each) for each in metas)
