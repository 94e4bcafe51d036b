"""What crosses between stages: tensors of shapes that the ranks have agreed on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosplit.pipeline.schedule.routes import Parcel
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.text.progress import working

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

    Not every tensor that could have a gradient gets one: of what a stage does not use, and of what
    it uses only for such, none comes back, as under autograd. That is told from the last stage to
    the first, when all are built.

    Attributes:
        known: the boundaries that this rank knows so far.
    """

    def __init__(self, mode: str, groups: Groups, check: Callable[[], None]) -> None:
        self._mode = mode
        self._groups = groups
        self._check = check
        self.known: dict[int, Boundary] = {}
        self._given: dict[tuple[int, int], tuple[bool, ...]] = {}

    def publish(self, boundary: int, metas: Sequence[TensorMeta]) -> Boundary:
        """Settle a boundary; the rank that holds the stage before it does so."""
        agreed = self.known[boundary] = tuple(metas)
        self._tell(f"{boundary}/built", [(m.shape, str(m.dtype), m.requires_grad) for m in agreed])
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
                    heard = self._hear(f"{stage}/built", stage)
                    self.known[stage] = tuple([_meta(*each) for each in heard])
        return self.known[boundary]

    def publish_gradients(self, boundary: int, taker: int, given: Sequence[bool]) -> None:
        """Say of which tensors that cross a boundary to a stage that stage gives a gradient."""
        self._given[boundary, taker] = tuple(given)
        self._tell(f"{boundary}/gradients of {taker}", given)

    def gradients(self, boundary: int, taker: int) -> Sequence[bool]:
        """Of which it does; waits until that is said.

        Raises:
            LostPeerError: as for ``learn``.
        """
        if (boundary, taker) not in self._given:
            heard = self._hear(f"{boundary}/gradients of {taker}", taker)
            self._given[boundary, taker] = tuple(heard)
        return self._given[boundary, taker]

    def crossing(self, parcel: Parcel, feeds: Feeds) -> Sequence[TensorMeta | None]:
        """What is in a parcel between stages that are known; None for a gradient that is not."""
        boundary, taker = parcel.boundary, parcel.taker
        metas = feeds.select(self.known[boundary], boundary, taker)
        if parcel.forward:
            return metas
        given = self._given.get((boundary, taker)) or [meta.requires_grad for meta in metas]
        return [meta if is_given else None for meta, is_given in zip(metas, given, strict=True)]

    def _tell(self, what: str, said: object) -> None:
        if self._groups.ranks > 1:
            self._groups.store.set(self._key(what), json.dumps(said))

    def _hear(self, what: str, stage: int) -> Any:
        store, timeout, key = self._groups.store, self._groups.timeout, self._key(what)
        deadline = time.monotonic() + timeout
        with self._groups.place.waits(), working(f"waiting for stage {stage}"):
            while not store.check([key]):
                self._check()
                if time.monotonic() > deadline:
                    waited = f"waited {timeout:.3g} s for stage {stage} to be built"
                    raise LostPeerError(
                        f"{waited}: is that rank stuck? A longer timeout= leaves more time for "
                        "building",
                        waited,
                    )
                time.sleep(_LOOK_EVERY)
        return json.loads(store.get(key))

    def _key(self, what: str) -> str:
        return f"autosplit/{self._mode}/{what}"


def _meta(shape: Sequence[int], dtype: str, wants: bool) -> TensorMeta:
    return TensorMeta(torch.Size(shape), getattr(torch, dtype.removeprefix("torch.")), wants)


def listed(metas: Sequence[TensorMeta | None]) -> str:
    """One part of a batch, in words."""
    return ", ".join("nothing" if each is None else str(each) for each in metas)
