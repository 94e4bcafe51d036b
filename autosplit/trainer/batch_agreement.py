"""Batches of all ranks: ranks agree on shapes and dtypes, and compare values.

Ranks compare the shapes and dtypes of their batches only if a rank has not seen the signature of
its batch before. Otherwise a bit mask of step plans in ``StepPlans`` is enough.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from autosplit.errors import BatchError
from autosplit.pipeline.engine.boundaries import TensorMeta
from autosplit.ranks.groups import Groups
from autosplit.trainer.agreement import difference
from autosplit.trainer.batches import BatchSlot

Metas: TypeAlias = "dict[str, TensorMeta]"
"""Shapes and dtypes of a batch's tensors by path: ``inputs``, or ``inputs[0]`` of several."""

_ADVICE = "pass the same batch on every rank, or None for parts that the rank's stages do not use"
_ADVICE_TO_REPLICAS = (
    "pass a replica's share of the batch on every rank of the replica, and equally many samples "
    "on each replica, as from a DistributedSampler and a DataLoader with drop_last=True"
)


def agree_on_batch(
    refusal: str,
    tensors: Mapping[str, Tensor],
    requiring_grad: Iterable[BatchSlot],
    groups: Groups,
    *,
    weighted: bool,
) -> tuple[Metas, frozenset[BatchSlot]]:
    """Agree with all ranks on the shapes of a batch, or raise on all of them; collective.

    Without the agreement, ranks would wait for a rank that refuses its batch, and a loss of 4
    samples' outputs and 8 samples' targets might broadcast. Replicas of the pipeline have different
    samples, but the same number. So the mean of their gradients is the gradient of the mean over
    all samples.

    Args:
        refusal: why this rank cannot run its batch; empty if it can.
        tensors: the batch on this rank, by path.
        requiring_grad: the tensors of the batch that need a gradient.
        groups: the trainer's process groups.
        weighted: whether this rank passes weights of the microbatches.

    Returns:
        (shapes and dtypes of all tensors that any rank has, the slots of tensors that need a
        gradient).

    Raises:
        BatchError: on every rank: a rank cannot run its batch, two ranks have different batches,
            only some pass weights, or a tensor needs a gradient on none or several ranks of a
            pipeline.
    """
    metas = {path: TensorMeta.of(tensor) for path, tensor in tensors.items()}
    rows = groups.everybody.gather((refusal, metas, [*requiring_grad], weighted))
    refusals, metas_by_rank, slots_by_rank, weighted_ranks = zip(*rows, strict=True)
    for rank, text in enumerate(refusals):
        if text:
            raise BatchError(refusal or f"rank {rank} refuses its batch: {text}")
    if len({*weighted_ranks}) > 1:
        raise BatchError(
            f"rank {weighted_ranks.index(True)} passes weight=, and rank "
            f"{weighted_ranks.index(False)} does not: every rank passes the weights of its pipeline"
        )
    advice = _ADVICE if groups.layout.shares == 1 else _ADVICE_TO_REPLICAS
    if (differing := difference(dict(enumerate(metas_by_rank)))) is not None:
        path, (first_rank, first_meta), (rank, meta) = differing
        raise BatchError(
            f"ranks have different batches: {path} is {first_meta} on rank {first_rank} and {meta} "
            f"on rank {rank}; {advice}"
        )
    _check_sample_counts(metas_by_rank, advice)
    slots = _agree_on_grad_slots(slots_by_rank, groups.layout.pipelines)
    return {path: meta for metas in metas_by_rank for path, meta in metas.items()}, slots


def _check_sample_counts(metas_by_rank: Sequence[Metas], advice: str) -> None:
    """Raise BatchError if two tensors of the batch have different numbers of samples."""
    counts: dict[int, str] = {}
    for rank, metas in enumerate(metas_by_rank):
        for path, meta in metas.items():
            if meta.shape:
                samples = meta.shape[0]
                text = f"{path} has {samples} samples along dimension 0 on rank {rank}"
                counts.setdefault(samples, text)
    if len(counts) > 1:
        first, other, *_ = counts.values()
        raise BatchError(
            f"the batch's {first}, but its {other}: every tensor of a batch has one row for each "
            "sample; a tensor without dimensions goes whole to each microbatch. If ranks have "
            f"different batches, {advice}"
        )


def _agree_on_grad_slots(
    slots_by_rank: Sequence[Iterable[BatchSlot]], pipelines: Sequence[Sequence[int]]
) -> frozenset[BatchSlot]:
    """Return the slots of the batch's tensors that need a gradient.

    Raises:
        BatchError: a tensor needs a gradient on no rank, or on several ranks, of a pipeline.
    """
    holders = defaultdict[BatchSlot, list[int]](list)
    for rank, slots in enumerate(slots_by_rank):
        for slot in slots:
            holders[slot].append(rank)
    for (name, number), ranks in holders.items():
        if any(sum(rank in row for rank in ranks) != 1 for row in pipelines):
            raise BatchError(
                f"number {number} of the batch's {name} needs a gradient on the ranks {ranks}; "
                "expected exactly one rank of each of the pipelines "
                f"{[*map(list, pipelines)]}: each of several would have a part of the gradient. "
                "Let one stage use the tensor and pass it on, or pass it detached (x.detach())"
            )
    return frozenset(holders)


def check_static(metas: Metas, first: Metas) -> None:
    """Check that a batch has the shapes and dtypes of the first batch.

    Raises:
        BatchError: names a tensor with another shape or dtype.
    """
    if (differing := difference({0: first, 1: metas})) is not None:
        path, (_, first_meta), (_, meta) = differing
        raise BatchError(
            f"the batch's {path} is {meta}, but was {first_meta} in the first batch: the shapes of "
            "this pipeline are static, as with every memory_limit and every model that the trainer "
            "has cut; pad the odd batch or drop it"
        )


_DIGEST_BYTES = 2**21
"""The most bytes of a tensor that a digest reads, spread over its samples, in the first step."""
_STEP_DIGEST_BYTES = 2**14
"""The most bytes of a tensor that a digest reads in every later step."""


def compare_contents(tensors: Mapping[str, Tensor], groups: Groups) -> None:
    """Warn, on every rank, if ranks of the same pipeline have batches with different values;
    collective.

    A difference is no error, because a tensor that a rank's stages do not use may be a placeholder.

    Args:
        tensors: the batch on this rank, by path.
        groups: the trainer's process groups.
    """
    digests = {path: _digest(tensor) for path, tensor in tensors.items() if type(tensor) is Tensor}
    differing = difference(dict(zip(groups.members, groups.gather(digests), strict=True)))
    if differing is not None:
        path, (first_rank, _), (rank, _) = differing
        warnings.warn(
            f"ranks have different batches: the values of {path} differ between rank {first_rank} "
            f"and rank {rank}. A step reads each input on the ranks whose stages use it and the "
            "targets on the last stage's rank, so it trains on a mixture: pass the same batch on "
            "every rank, or None for parts that the rank's stages do not use. Only the first batch "
            "is compared",
            UserWarning,
            stacklevel=7,  # the caller of ``step``
        )


def summary_of(tensors: Iterable[Tensor | None]) -> int:
    """Return a checksum of 40 bits of the tensors, cheap enough for every step.

    It covers some of the values of each tensor, spread over its samples.
    """
    digests = "".join(_digest(t, _STEP_DIGEST_BYTES) for t in tensors if t is not None)
    return int.from_bytes(hashlib.sha256(digests.encode()).digest()[:5])


def _digest(tensor: Tensor, limit: int = _DIGEST_BYTES) -> str:
    """Hash a tensor's values, or about ``limit`` bytes of them that are spread over its samples."""
    values = tensor.detach()
    if values.dim() and values.nbytes > limit:
        values = values[:: -(-values.nbytes // limit)].flatten()[: limit // values.itemsize]
    values = values.cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
