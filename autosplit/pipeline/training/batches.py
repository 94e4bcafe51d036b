"""The batches of a trainer: cut into microbatches, and held against those of other ranks.

What a rank knows of a batch is its signature. Ranks that all know theirs only say so: of the steps
that each may be about to run, all have one in common. Else they tell each other what they have.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autosplit.errors import BatchError, PipelineError
from autosplit.pipeline.engine.boundaries import TensorMeta, listed
from autosplit.pipeline.engine.groups import Groups

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


def paired(batch: Any, target: Part | None, named: Mapping[str, Tensor]) -> Batch | None:
    """A batch as the pair (inputs, targets); ``target`` is given where ``batch`` is inputs only, or
    these are given by name.
    """
    if named:
        batch = named if batch is None else (batch, named)  # which is refused, on all ranks
    return batch if target is None and not named else (batch, target)


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

    def __call__(self, batch: Batch | None) -> tuple[Microbatches, Microbatches]:
        """Inputs and targets per microbatch; empty lists for what this rank does not need.

        Raises:
            PipelineError: a part is missing, or as ``given``.
        """
        given = self.given(batch)
        return self._split("inputs", given), self._split("targets", given)

    def given(self, batch: Batch | None) -> dict[str, Given]:
        """The tensors of a batch by part: whatever this rank was given.

        Raises:
            PipelineError: a part is not made of tensors, cannot be divided, or has tensors of
                different numbers of samples.
        """
        if batch is None:
            return {}
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise PipelineError(
                f"a batch is a pair (inputs, targets); got {_kind(batch)}. Either part may be a "
                "tensor or a tuple of tensors: step((x, y)), or step(x, target=y); of a model that "
                "computes its own loss, step({...}, target=())"
            )
        found = {
            name: self._tensors(name, self._by_path(name, part))
            for name, part in zip(self._takes, batch, strict=True)
            if part is not None
        }
        _check_samples([each for part in found.values() for each in part.items()])
        return found

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
            if isinstance(tensor, Mapping):
                raise PipelineError(
                    f"the batch's {name} are given by name, {', '.join(map(str, tensor))}, and "
                    "this trainer takes them in order: step((x, y), target=z). Names are for a "
                    "model that was cut with an example that has them"
                )
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


def signature(batch: object) -> Hashable:
    """Tells batches apart by shape, as one rank was given them."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, Mapping):
        return tuple([(name, signature(each)) for name, each in batch.items()])
    if isinstance(batch, tuple | list):
        return tuple(map(signature, batch))
    return None if batch is None else type(batch).__name__


Parts: TypeAlias = "Mapping[str, Sequence[TensorMeta | None]]"
"""What there is of a batch: ``inputs`` and ``targets``, each if it is; None for a tensor left out.
"""


def parts_of(given: Mapping[str, Given]) -> Parts:
    """What a rank was given."""
    return {
        name: [None if each is None else TensorMeta.of(each) for each in part.values()]
        for name, part in given.items()
    }


_ADVICE = "give every rank the same batch, or leave out (None) what its stages do not take"
_ADVICE_TO_REPLICAS = (
    "give every rank of a replica the replica's share of the batch, and each replica as many "
    "samples, as a DistributedSampler and a DataLoader with drop_last=True do"
)


def agree_on_batch(refused: str, parts: Parts, groups: Groups) -> Parts:
    """Have all ranks take a batch, or none of them: what there is of it on any; collective.

    Without it, ranks would wait for one that refuses, and a loss of 4 samples' outputs and 8
    samples' targets may well broadcast.

    Args:
        refused: why this rank takes no such batch; empty where it does.
        parts: what it was given.
        groups: the trainer's process groups.

    Raises:
        BatchError: on every rank: one refuses it, or two were given different batches.
    """
    said: list[tuple[str, Parts]] = groups.everybody.gather((refused, parts))
    for rank, (text, _) in enumerate(said):
        if text:
            raise BatchError(refused or f"rank {rank} refuses its batch: {text}")
    everywhere = [each for _, each in said]
    _check_same(everywhere, groups)
    return {
        name: [
            next(filter(None, metas), None)
            for metas in zip_longest(*(each.get(name, ()) for each in everywhere))
        ]
        for name in ("inputs", "targets")
    }


def alike(one: Parts, other: Parts) -> bool:
    """Whether one step runs both."""
    return all(_agree(one[name], other[name]) for name in one)


def check_static(parts: Parts, first: Parts) -> None:
    """Refuse another shape than the first.

    Raises:
        BatchError: says which.
    """
    for name, now in parts.items():
        if not _agree(now, first[name]):
            raise BatchError(
                f"the batch's {name} are {listed(now)}, but were {listed(first[name])} at first: "
                "the shapes of this pipeline are static, as memory_limit and a model that the "
                "trainer has cut are for one; pad or drop the odd batch"
            )


def _check_same(everywhere: Sequence[Parts], groups: Groups) -> None:
    """Refuse different batches. Replicas of the pipeline have samples of their own, as many as each
    other: the mean of their gradients is that of all samples.
    """
    advice = _ADVICE if groups.layout.shares == 1 else _ADVICE_TO_REPLICAS
    for name in ("inputs", "targets"):
        given = [(rank, parts[name]) for rank, parts in enumerate(everywhere) if parts.get(name)]
        for rank, part in given[1:]:
            first, other = given[0]
            if not _agree(other, part):
                raise BatchError(
                    f"the ranks were given different batches: the {name} are {listed(other)} on "
                    f"rank {first} and {listed(part)} on rank {rank}; {advice}"
                )
    counts = {
        meta.shape[0]: f"{name} of {meta.shape[0]} samples on rank {rank}"
        for rank, parts in enumerate(everywhere)
        for name, part in parts.items()
        for meta in part
        if meta is not None and meta.shape
    }
    if len(counts) > 1:
        raise BatchError(
            f"the ranks were given different batches: {' and '.join(counts.values())}; {advice}"
        )


def _agree(one: Sequence[TensorMeta | None], other: Sequence[TensorMeta | None]) -> bool:
    """Whether two ranks may have been given parts of the same; either may lack tensors."""
    if len(one) != len(other) and None not in (*one, *other):
        return False
    pairs = zip(one, other, strict=False)
    return all(a == b for a, b in pairs if a is not None and b is not None)


_BYTES = 2**21
"""Of a tensor, at most so many are looked at: spread over its samples."""
_OF_EACH = 2**14


def compare_contents(tensors: Mapping[str, Mapping[str, Tensor | None]], groups: Groups) -> None:
    """Warn on every rank where ranks of its pipeline were given other values; collective.

    No error: what a rank's stages do not take may be a stand-in.

    Args:
        tensors: what this rank was given, by part and path; None for a tensor left out.
        groups: the trainer's process groups.
    """
    if groups.ranks == 1:
        return
    own = {
        f"{name} {place}": digest(tensor)
        for name, part in tensors.items()
        for place, tensor in enumerate(part.values())
        if type(tensor) is Tensor
    }
    ranks_by: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, digests in enumerate(groups.gather(own)):
        for what, seen in digests.items():
            ranks_by[what][seen].append(groups.members[rank])
    differing = {what: list(by.values()) for what, by in ranks_by.items() if len(by) > 1}
    if differing:
        # The caller of ``step``, behind the runner.
        warnings.warn(_told(differing), UserWarning, stacklevel=7)


def summary_of(tensors: Iterable[Tensor | None]) -> int:
    """A number of 40 bits that stands for some of the values of each tensor, spread over the
    samples: little enough to be looked at in every step.
    """
    found = "".join(digest(each, _OF_EACH) for each in tensors if each is not None)
    return int.from_bytes(hashlib.sha256(found.encode()).digest()[:5])


def digest(tensor: Tensor, most: int = _BYTES) -> str:
    """Of the values, or of so many bytes of them that are spread over the samples."""
    values = tensor.detach()
    if values.dim() and values.nbytes > most:
        values = values[:: -(-values.nbytes // most)].flatten()[: most // values.itemsize]
    values = values.cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


def _told(differing: Mapping[str, Sequence[Sequence[int]]]) -> str:
    parts = dict.fromkeys(what.partition(" ")[0] for what in differing)
    groups = next(iter(differing.values()))
    ranks = " and others on ".join(
        f"rank{'s' if len(each) > 1 else ''} {', '.join(map(str, each))}" for each in groups
    )
    return (
        f"the ranks were given different batches: the {' and the '.join(parts)} have some values "
        f"on {ranks}. A step takes the inputs of the ranks whose stages take them and the targets "
        "of the last stage's rank, so that it trains on a mixture: give every rank the same batch, "
        "or leave out (None) what its stages do not take. Only the first batch is compared"
    )
