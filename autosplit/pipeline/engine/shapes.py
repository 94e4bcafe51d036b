"""The static shapes of a pipeline: of what crosses between stages, and of the batches that come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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


Part: TypeAlias = "Tensor | Sequence[Tensor]"
"""The targets of a batch, or its inputs: one tensor or several, samples along dimension 0."""

Inputs: TypeAlias = "Part | Sequence[Tensor | None] | Mapping[str, Tensor]"
"""The inputs of a batch: a dictionary where the wiring names them. Of several, a rank may leave
out those (None, or no such key) that its stages do not take."""

Batch: TypeAlias = "tuple[Inputs | None, Part | None]"
"""Inputs and targets. A rank that needs neither, or only one, may leave the other out (None)."""

Given: TypeAlias = "dict[str, Tensor | None]"
"""The tensors of one part in order, by their paths; None for one that is left out."""

Microbatches: TypeAlias = "list[list[Any]]"
"""Per microbatch its tensors, in order; None for what this rank does not take."""


class BatchSplitter:
    """Cuts batches for one rank.

    Whatever a rank passes is checked, also what it does not need, so that a bad batch is an error
    on every rank that sees it.

    Args:
        microbatches: M, into how many microbatches.
        device: where the microbatches go.
        inputs: which of the inputs this rank's stages take; None for all there are.
        targets: whether this rank holds the last stage, which takes the targets.
        names: the names of the inputs, where they may come as a dictionary.

    Attributes:
        agreed: what ``inputs`` and ``targets`` are in every step, those that this rank was given.
        offered: what they are in the latest batch.
    """

    def __init__(
        self,
        microbatches: int,
        device: torch.device,
        *,
        inputs: frozenset[int] | None,
        targets: bool,
        names: Sequence[str] = (),
    ) -> None:
        self._count = microbatches
        self._device = device
        self._takes = {"inputs": inputs, "targets": None if targets else frozenset()}
        self._names = names
        self.agreed: dict[str, list[TensorMeta | None]] = {}
        self.offered: dict[str, list[TensorMeta | None]] = {}

    def __call__(self, batch: Batch | None) -> tuple[Microbatches, Microbatches]:
        """Inputs and targets per microbatch; empty lists for what this rank does not need.

        Raises:
            PipelineError: a part is missing, is not made of tensors, cannot be divided, has tensors
                of different numbers of samples, or another shape or dtype than at first.
        """
        self.offered = {}
        given = self.given(batch)
        _check_samples([each for part in given.values() for each in part.items()])
        for name, part in given.items():
            self._check_static(name, part.values())
        return self._split("inputs", given), self._split("targets", given)

    def accept(self) -> None:
        """Hold later batches to what the latest one is."""
        self.agreed = {**self.offered, **self.agreed}

    def given(self, batch: Batch | None) -> dict[str, Given]:
        """The tensors of a batch by part: whatever this rank was given."""
        if batch is None:
            return {}
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise PipelineError(
                f"a batch is a pair (inputs, targets); got {_kind(batch)}. Either part may be a "
                "tensor or a tuple of tensors"
            )
        return {
            name: self._tensors(name, self._by_path(name, part))
            for name, part in zip(self._takes, batch, strict=True)
            if part is not None
        }

    def _split(self, name: str, given: Mapping[str, Given]) -> Microbatches:
        takes, part = self._takes[name], given.get(name)
        if part is None:
            if takes is None or takes:
                raise PipelineError(
                    f"this rank holds a stage that takes the batch's {name}; got None"
                )
            return []
        tensors = [*part.values()]
        if takes is not None:
            if not takes:
                return []
            self._check_there(takes, tensors)
            tensors = [t if place in takes else None for place, t in enumerate(tensors)]
        pieces = [self._cut(tensor) for tensor in tensors]
        return [*map(list, zip(*pieces, strict=True))] or [[] for _ in range(self._count)]

    def _cut(self, tensor: Tensor | None) -> Sequence[Tensor | None]:
        if tensor is None:
            return [None] * self._count
        moved = tensor.to(self._device, non_blocking=True)
        return moved.chunk(self._count) if moved.dim() else [moved] * self._count

    def _by_path(self, name: str, part: Inputs) -> Mapping[str, object]:
        """The tensors of a part in order, None for one that is left out."""
        if name == "inputs" and self._names and isinstance(part, Mapping):
            unknown = [key for key in part if key not in self._names]
            if unknown:
                raise PipelineError(
                    f"the batch's inputs have {unknown[0]!r}; the model was cut with "
                    f"{', '.join(self._names)}"
                )
            return {f"inputs[{key!r}]": part.get(key) for key in self._names}
        if isinstance(part, tuple | list):
            return {f"{name}[{place}]": each for place, each in enumerate(part)}
        return {name: part}

    def _check_there(self, takes: frozenset[int], tensors: Sequence[Tensor | None]) -> None:
        for place in sorted(takes):
            if place >= len(tensors) or tensors[place] is None:
                wanted = repr(self._names[place]) if self._names else f"number {place}"
                raise PipelineError(
                    f"a stage of this rank takes the batch's input {wanted}, which is not there; "
                    f"got {sum(each is not None for each in tensors)} inputs"
                )

    def _tensors(self, name: str, part: Mapping[str, object]) -> Given:
        """The tensors of a part, each with samples that can be divided, or none at all."""
        checked: Given = {}
        for path, tensor in part.items():
            if tensor is None and name == "inputs" and self._takes[name] is not None:
                checked[path] = None
                continue
            if not isinstance(tensor, Tensor):
                raise PipelineError(
                    f"the batch's {name} must be a tensor or a tuple of tensors; "
                    f"found a {type(tensor).__name__}{_made_tensor(tensor)}"
                )
            rows = len(tensor) if tensor.dim() else self._count
            if rows == 0 or rows % self._count:
                fitting = max(rows // self._count, 1) * self._count
                raise PipelineError(
                    f"the batch's {path} has shape {list(tensor.shape)}: {rows} samples along "
                    f"dimension 0 cannot be cut into {self._count} equal microbatches; pass "
                    f"{fitting} or another multiple of {self._count}"
                )
            checked[path] = tensor
        return checked

    def _check_static(self, name: str, tensors: Iterable[Tensor | None]) -> None:
        now = [None if each is None else TensorMeta.of(each) for each in tensors]
        self.offered[name] = now
        first = self.agreed.get(name, now)
        if now != first:
            raise PipelineError(
                f"the batch's {name} are {listed(now)}, but were {listed(first)} at first: the "
                "shapes of this pipeline are static, as memory_limit and a model that the trainer "
                "has cut are for one; pad or drop the odd batch"
            )


def _check_samples(given: Iterable[tuple[str, Tensor | None]]) -> None:
    """Refuse tensors of different numbers of samples, which a loss may well broadcast."""
    counted = [(path, len(each)) for path, each in given if each is not None and each.dim()]
    for path, count in counted[1:]:
        first, rows = counted[0]
        if count != rows:
            raise PipelineError(
                f"the batch's {first} has {rows} samples along dimension 0, but its {path} has "
                f"{count}: every tensor of a batch has one row for each sample; one without "
                "dimensions goes whole to each microbatch"
            )


def listed(metas: Sequence[TensorMeta | None]) -> str:
    """One part of a batch, in words."""
    return ", ".join("nothing" if each is None else str(each) for each in metas)


def _made_tensor(value: object) -> str:
    """How to make a tensor of what is none, where there is a usual way."""
    if hasattr(value, "__array__"):
        return ": torch.from_numpy(array) makes a tensor of an array, on the same memory"
    return ""


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"
