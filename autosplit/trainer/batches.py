"""The batches of a trainer: cut into microbatches, and held against those of other ranks.

What a rank knows of a batch is its signature. Ranks that all know theirs only say so: of the steps
that each may be about to run, all have one in common. Else they tell each other what they have.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autosplit.errors import BatchError, PipelineError
from autosplit.pipeline.engine.boundaries import TensorMeta
from autosplit.ranks.groups import Groups
from autosplit.trainer.agreement import difference

BatchPart: TypeAlias = "Tensor | Sequence[Tensor]"
"""The targets of a batch, or its inputs: one tensor or several, samples along dimension 0."""

Inputs: TypeAlias = "BatchPart | Sequence[Tensor | None] | Mapping[str, Tensor]"
"""The inputs of a batch: a dictionary where the wiring names them. Of several, a rank may leave
out those (None, or no such key) that its stages do not take."""

Batch: TypeAlias = "tuple[Inputs | None, BatchPart | None]"
"""Inputs and targets. A rank that needs neither, or only one, may leave the other out (None)."""

Metas: TypeAlias = "dict[str, TensorMeta]"
"""What there is of a batch, by path: ``inputs``, or ``inputs[0]`` where there may be several."""

BatchSlot: TypeAlias = "tuple[str, int]"
"""A tensor of a batch: one of its ``inputs`` or of its ``targets``, by number."""

Microbatches: TypeAlias = "list[list[Any]]"
"""Per microbatch its tensors, in order; None for what this rank does not take."""


def paired(batch: Any, target: BatchPart | None, named: Mapping[str, Tensor]) -> Batch | None:
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
        """Inputs and targets per microbatch, of a batch that ``given`` takes; empty lists for what
        this rank does not need.
        """
        inputs, targets = (None, None) if batch is None else batch
        return self._cut("inputs", inputs), self._cut("targets", targets)

    def _cut(self, name: str, part: Any) -> Microbatches:
        takes = self._takes[name]
        if part is None or (takes is not None and not takes):
            return []
        pieces: list[Sequence[Tensor | None]] = []
        for place, tensor in enumerate(self._in_order(part)):
            if takes is not None and place not in takes:
                pieces.append([None] * self._count)
                continue
            moved = tensor.detach().to(self._device, non_blocking=True)
            pieces.append(moved.chunk(self._count) if moved.dim() else [moved] * self._count)
        return [*map(list, zip(*pieces, strict=True))] or [[] for _ in range(self._count)]

    def requiring_grad(self, batch: Batch | None) -> dict[BatchSlot, Tensor]:
        """The tensors of a batch that ``given`` takes which need a gradient.

        Raises:
            PipelineError: no stage of this rank takes one of them.
        """
        tensors = {}
        for (name, takes), part in zip(self._takes.items(), batch or (), strict=False):
            for place, (path, tensor) in enumerate(self._by_path(name, part).items()):
                if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                    continue
                if takes is not None and place not in takes:
                    raise PipelineError(
                        f"the batch's {path} needs a gradient, and no stage of this rank takes it: "
                        "pass it detached (x.detach()) or leave it out (None) here, and with a "
                        "gradient on the rank whose stage takes it"
                    )
                tensors[name, place] = tensor
        return tensors

    def _in_order(self, part: Any) -> Sequence[Any]:
        if isinstance(part, Mapping):
            return [part.get(name) for name in self._names]
        return part if isinstance(part, tuple | list) else [part]

    def given(self, batch: Batch | None) -> dict[str, Tensor]:
        """The tensors of a batch by path: whatever this rank was given.

        Raises:
            PipelineError: a part that this rank takes is missing, is not made of tensors, or cannot
                be divided.
        """
        if batch is None:
            batch = None, None
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise PipelineError(
                f"a batch is a pair (inputs, targets); got {_kind(batch)}. Either part may be a "
                "tensor or a tuple of tensors: step((x, y)), or step(x, target=y); of a model that "
                "computes its own loss, step({...}, target=())"
            )
        found = {}
        for (name, takes), part in zip(self._takes.items(), batch, strict=True):
            if part is None:
                if takes is None or takes:
                    raise PipelineError(
                        f"this rank holds a stage that takes the batch's {name}; got None"
                    )
                continue
            tensors = self._by_path(name, part)
            there = [each is not None for each in tensors.values()]
            for place in sorted(takes or ()):
                if place >= len(there) or not there[place]:
                    wanted = repr(self._names[place]) if self._names else f"number {place}"
                    raise PipelineError(
                        f"a stage of this rank takes the batch's input {wanted}, which is not "
                        f"there; got {sum(there)} inputs"
                    )
            for path, tensor in tensors.items():
                if tensor is not None or name == "targets" or takes is None:
                    found[path] = self._checked(name, path, tensor)
        return found

    def _by_path(self, name: str, part: Any) -> Mapping[str, object]:
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

    def _checked(self, name: str, path: str, tensor: object) -> Tensor:
        """What has samples that can be divided, or none at all."""
        if isinstance(tensor, Mapping):
            raise PipelineError(
                f"the batch's {name} are given by name, {', '.join(map(str, tensor))}, and "
                "this trainer takes them in order: step((x, y), target=z). Names are for a "
                "model that was cut with an example that has them"
            )
        if not isinstance(tensor, Tensor):
            how = ": torch.from_numpy(array) makes a tensor of an array, on the same memory"
            raise PipelineError(
                f"the batch's {name} must be a tensor or a tuple of tensors; "
                f"found a {type(tensor).__name__}{how if hasattr(tensor, '__array__') else ''}"
            )
        rows = len(tensor) if tensor.dim() else self._count
        if rows == 0 or rows % self._count:
            fitting = max(rows // self._count, 1) * self._count
            raise PipelineError(
                f"the batch's {path} has shape {list(tensor.shape)}: {rows} samples along "
                f"dimension 0 cannot be cut into {self._count} equal microbatches; pass "
                f"{fitting} or another multiple of {self._count}"
            )
        return tensor


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"


def signature(batch: object) -> Hashable:
    """Tells batches apart by shape, as one rank was given them."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype, batch.requires_grad
    if isinstance(batch, Mapping):
        return tuple([(name, signature(each)) for name, each in batch.items()])
    if isinstance(batch, tuple | list):
        return tuple(map(signature, batch))
    return None if batch is None else type(batch).__name__


# --- what all ranks were given --------------------------------------------------------------------

_ADVICE = "give every rank the same batch, or leave out (None) what its stages do not take"
_ADVICE_TO_REPLICAS = (
    "give every rank of a replica the replica's share of the batch, and each replica as many "
    "samples, as a DistributedSampler and a DataLoader with drop_last=True do"
)


def agree_on_batch(
    refused: str, given: Mapping[str, Tensor], requiring_grad: Iterable[BatchSlot], groups: Groups
) -> tuple[Metas, frozenset[BatchSlot]]:
    """Have all ranks take a batch, or none of them: what there is of it on any, and which of it
    needs a gradient; collective.

    Replicas of the pipeline have samples of their own, as many as each other: the mean of their
    gradients is that of all samples. Without it, ranks would wait for one that refuses, and a loss
    of 4 samples' outputs and 8 samples' targets may well broadcast.

    Args:
        refused: why this rank takes no such batch; empty where it does.
        given: what it was given, by path.
        requiring_grad: which tensors of it need a gradient.
        groups: the trainer's process groups.

    Raises:
        BatchError: on every rank: one refuses it, two were given different batches, or a tensor
            does not need a gradient on exactly one rank of each pipeline.
    """
    own = {path: TensorMeta.of(tensor) for path, tensor in given.items()}
    heard = groups.everybody.gather((refused, own, [*requiring_grad]))
    said = [(text, metas) for text, metas, _ in heard]
    for rank, (text, _) in enumerate(said):
        if text:
            raise BatchError(refused or f"rank {rank} refuses its batch: {text}")
    advice = _ADVICE if groups.layout.shares == 1 else _ADVICE_TO_REPLICAS
    if (found := difference({rank: metas for rank, (_, metas) in enumerate(said)})) is not None:
        path, (one, here), (two, there) = found
        raise BatchError(
            f"the ranks were given different batches: {path} is {here} on rank {one} and {there} "
            f"on rank {two}; {advice}"
        )
    counts: dict[int, str] = {}
    for rank, (_, metas) in enumerate(said):
        for path, meta in metas.items():
            if meta.shape:
                rows = meta.shape[0]
                told = f"{path} has {rows} samples along dimension 0 on rank {rank}"
                counts.setdefault(rows, told)
    if len(counts) > 1:
        first, other, *_ = counts.values()
        raise BatchError(
            f"the batch's {first}, but its {other}: every tensor of a batch has one row for each "
            "sample; one without dimensions goes whole to each microbatch. If ranks were given "
            f"different batches, {advice}"
        )
    slots = _agree_on_grad_slots([row for _, _, row in heard], groups.layout.pipelines)
    return {path: meta for _, metas in said for path, meta in metas.items()}, slots


def _agree_on_grad_slots(
    slots_by_rank: Sequence[Iterable[BatchSlot]], pipelines: Sequence[Sequence[int]]
) -> frozenset[BatchSlot]:
    """Which tensors of the batch need a gradient.

    Raises:
        BatchError: one does not need it on exactly one rank of each pipeline.
    """
    holders = defaultdict[BatchSlot, list[int]](list)
    for rank, slots in enumerate(slots_by_rank):
        for slot in slots:
            holders[slot].append(rank)
    for (name, number), ranks in holders.items():
        if any(sum(rank in row for rank in ranks) != 1 for row in pipelines):
            raise BatchError(
                f"number {number} of the batch's {name} needs a gradient on the ranks {ranks}, and "
                f"must on exactly one rank of each of the pipelines {[*map(list, pipelines)]}: on "
                "several, each would give a part of it. Let one stage take it and hand it on, or "
                "pass it detached (x.detach())"
            )
    return frozenset(holders)


def deliver_gradients(
    tensors: Mapping[BatchSlot, Tensor],
    gradients: Mapping[BatchSlot, Mapping[int, Tensor]],
    count: int,
    shares: int,
) -> None:
    """Give tensors of a batch their gradients, as ``backward()`` of the step's loss does.

    Args:
        tensors: those that need a gradient.
        gradients: of the mean over the microbatches, by microbatch, those that are there.
        count: how many microbatches there are.
        shares: how many shares of the batch the loss is the mean of.
    """
    reached, totals = [], []
    for slot, tensor in tensors.items():
        if row := gradients.get(slot):
            zeros = torch.zeros_like(next(iter(row.values())))
            parts = [row.get(microbatch, zeros) for microbatch in range(count)]
            total = torch.cat(parts) if tensor.dim() else torch.stack(parts).sum(0)
            reached.append(tensor)
            totals.append((total / shares if shares > 1 else total).to(tensor.device))
    if reached:
        torch.autograd.backward(reached, totals)


def check_static(now: Metas, first: Metas) -> None:
    """Refuse another shape than the first.

    Raises:
        BatchError: says which.
    """
    if (found := difference({0: first, 1: now})) is not None:
        path, (_, before), (_, came) = found
        raise BatchError(
            f"the batch's {path} is {came}, but was {before} at first: the shapes of this pipeline "
            "are static, as memory_limit and a model that the trainer has cut are for one; pad or "
            "drop the odd batch"
        )


_BYTES = 2**21
"""Of a tensor, at most so many are looked at: spread over its samples."""
_OF_EACH = 2**14


def compare_contents(given: Mapping[str, Tensor], groups: Groups) -> None:
    """Warn on every rank where ranks of its pipeline were given other values; collective.

    No error: what a rank's stages do not take may be a stand-in.

    Args:
        given: what this rank was given, by path.
        groups: the trainer's process groups.
    """
    own = {path: _digest(tensor) for path, tensor in given.items() if type(tensor) is Tensor}
    found = difference(dict(zip(groups.members, groups.gather(own), strict=True)))
    if found is not None:
        path, (one, _), (two, _) = found
        # The caller of ``step``, behind the runner.
        warnings.warn(
            f"the ranks were given different batches: {path} has some values on rank {one} and "
            f"others on rank {two}. A step takes the inputs of the ranks whose stages take them "
            "and the targets of the last stage's rank, so that it trains on a mixture: give every "
            "rank the same batch, or leave out (None) what its stages do not take. Only the first "
            "batch is compared",
            UserWarning,
            stacklevel=7,
        )


def summary_of(tensors: Iterable[Tensor | None]) -> int:
    """A number of 40 bits that stands for some of the values of each tensor, spread over the
    samples: little enough to be looked at in every step.
    """
    found = "".join(_digest(each, _OF_EACH) for each in tensors if each is not None)
    return int.from_bytes(hashlib.sha256(found.encode()).digest()[:5])


def _digest(tensor: Tensor, most: int = _BYTES) -> str:
    """Of the values, or of so many bytes of them that are spread over the samples."""
    values = tensor.detach()
    if values.dim() and values.nbytes > most:
        values = values[:: -(-values.nbytes // most)].flatten()[: most // values.itemsize]
    values = values.cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
