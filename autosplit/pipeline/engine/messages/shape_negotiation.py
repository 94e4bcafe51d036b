"""How neighbouring stages agree on the tensors that cross between them, once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.faults.first_error import KeyValueStore, LostPeerError

from .process_groups import Groups

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
            rows = [(list(meta.shape), str(meta.dtype), meta.requires_grad) for meta in agreed]
            text = json.dumps(rows)
            first = self._groups.store.compare_set(self._key(boundary), "", text).decode()
            if first != text:
                raise PipelineError(
                    f"stage {boundary} puts out {', '.join(map(str, agreed))} here and "
                    f"{', '.join(map(str, _read(first)))} on the rank of its other copy: give "
                    "both the same batch"
                )
        return agreed

    def learn(self, boundary: int) -> Boundary:
        """Wait until ``boundary`` is settled.

        Raises:
            LostPeerError: another rank failed, or a stage was not ready within the timeout. Stages
                become ready one after another; each has the whole timeout.
        """
        for earlier in range(boundary):
            if earlier not in self.known:
                self._await(earlier)
        if boundary not in self.known:
            self.known[boundary] = _read(self._await(boundary))
        return self.known[boundary]

    def start(self) -> None:
        """Say that this rank's stages are compiled, and wait until all are, of replicas of the
        pipeline too: a step's clock starts for all ranks together.

        Raises:
            LostPeerError: as ``learn``.
        """
        everybody = self._groups.everybody
        if everybody.ranks == 1:
            return
        everybody.store.set(self._key(everybody.rank, "compiled"), "")
        for rank in range(everybody.ranks):
            self._await(rank, "compiled", "the stages of rank", everybody.store)

    def _await(
        self,
        number: int,
        what: str = "built",
        whose: str = "stage",
        store: KeyValueStore | None = None,
    ) -> bytes:
        store, key = store or self._groups.store, self._key(number, what)
        deadline = time.monotonic() + self._groups.timeout
        with self._groups.place.waits():
            while not store.check([key]):
                self._check()
                if time.monotonic() > deadline:
                    waited = (
                        f"waited {self._groups.timeout:.3g} s for {whose} {number} to be {what}"
                    )
                    raise LostPeerError(
                        f"{waited}: is that rank stuck? A longer timeout= leaves more time for "
                        "building",
                        waited,
                    )
                time.sleep(_LOOK_EVERY)
        return store.get(key)

    def _key(self, number: int, what: str = "built") -> str:
        return f"autosplit/{self._mode}/{number}/{what}"


def _read(text: str | bytes) -> Boundary:
    rows = json.loads(text)
    return tuple(TensorMeta(torch.Size(sizes), _dtype(name), wants) for sizes, name, wants in rows)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise PipelineError(f"another rank named the dtype {name!r}, which this torch lacks")
    return dtype
