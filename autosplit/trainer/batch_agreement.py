"""Ranks agree on the shapes and dtypes of their batches, and compare the batches' values.

Ranks compare the shapes and dtypes of their batches only if a rank has not seen the signature of
its batch before. Otherwise ``StepPlans`` agrees on a known step plan by a bit mask.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from autosplit.errors import BatchError
from autosplit.pipeline.engine.boundaries import TensorMeta
from autosplit.ranks.groups import Groups
from autosplit.trainer.agreement import difference
from autosplit.trainer.batches import BatchSlot

Metas: TypeAlias = "dict[str, TensorMeta | str]"
"""Shapes and dtypes of a batch's tensors by path, and the texts of its numbers. A path is
``inputs``, ``inputs[0]`` of several, or ``microbatches[0].inputs`` in a list of microbatches."""
_MICROBATCH = re.compile(r"microbatches\[(\d+)\]\.")

_ADVICE = "pass the same batch on every rank, or None for parts that the rank's stages do not use"
_ADVICE_TO_REPLICAS = (
    "pass a replica's share of the batch on every rank of the replica, and equally many samples "
    "on each replica, as from a DistributedSampler and a DataLoader with drop_last=True"
)


def by_microbatch(metas: Metas) -> dict[int, Metas]:
    """Map each microbatch of a list to its metas, by path within the microbatch. A batch that is
    cut is one entry, 0.
    """
    rows: dict[int, Metas] = defaultdict(dict)
    for path, meta in metas.items():
        place = _MICROBATCH.match(path)
        if place is None:
            rows[0][path] = meta
        else:
            rows[int(place[1])][path[place.end() :]] = meta
    return rows


class OfferedBatch(NamedTuple):
    """The batch of one rank, as the other ranks see it.

    Attributes:
        refusal: why this rank cannot run it; empty if it can.
        metas: shapes and dtypes of its tensors, by path.
        requiring_grad: the tensors of the batch that need a gradient.
        weights: the number of weights; 0 for a single weight for all microbatches; None without
            weights.
        weights_digest: the digest of the weights' values.
        microbatches: the length of a list of microbatches; 0 for a batch that is cut, None if this
            rank passes nothing.
    """

    refusal: str
    metas: Metas
    requiring_grad: list[BatchSlot]
    weights: int | None
    weights_digest: int
    microbatches: int | None


class AgreedBatch(NamedTuple):
    """The batch of one pipeline.

    Attributes:
        metas: shapes and dtypes of all tensors that any rank of the pipeline has.
        microbatches: the length of the list of microbatches; 0 for a batch that is cut.
        weights: the numbers of weights that the ranks of the pipeline offer, see ``OfferedBatch``.
    """

    metas: Metas
    microbatches: int
    weights: set[int | None]

    def check_weights(self, count: int) -> None:
        """Check the number of weights.

        Raises:
            BatchError: there are more weights, or fewer, than microbatches.
        """
        for number in self.weights - {None, 0, count}:
            raise BatchError(
                f"weight has {number} numbers for {count} microbatches: pass one for each "
                "microbatch, or a single number for all"
            )


def agree_on_batch(
    offered: OfferedBatch, groups: Groups
) -> tuple[list[AgreedBatch], frozenset[BatchSlot]]:
    """Agree with all ranks on the shapes of a batch, or raise on all of them; collective.

    Without this check, ranks would wait for a rank that refuses its batch, and a loss of 4 samples'
    outputs and 8 samples' targets may broadcast. Replicas of the pipeline have different samples.
    If their batches are cut, all have the same number of samples: so the mean of their gradients is
    the gradient of the mean over all samples. Lists of microbatches may differ between replicas.

    Args:
        offered: the batch of this rank.
        groups: the trainer's process groups.

    Returns:
        The batch of each pipeline, and the slots that need a gradient.

    Raises:
        BatchError: on every rank: a rank cannot run its batch, two ranks have different batches,
            only some pass weights, or a tensor needs a gradient on none or several ranks of a
            pipeline.
    """
    rows: list[OfferedBatch] = groups.everybody.gather(offered)
    for rank, row in enumerate(rows):
        if row.refusal:
            raise BatchError(offered.refusal or f"rank {rank} refuses its batch: {row.refusal}")
    weighted = [row.weights is not None for row in rows]
    if len({*weighted}) > 1:
        raise BatchError(
            f"rank {weighted.index(True)} passes weight=, and rank {weighted.index(False)} does "
            "not: pass weight= on every rank, with the weights of the rank's pipeline, or on none"
        )
    digests = [{rows[rank].weights_digest for rank in ranks} for ranks in groups.layout.pipelines]
    check_weights([min(row) if len(row) == 1 else None for row in digests], groups)
    lengths = _agree_on_lengths(rows, groups)
    advice = _ADVICE if groups.layout.shares == 1 else _ADVICE_TO_REPLICAS
    one_batch = [[*range(len(rows))]] if not any(lengths) else groups.layout.pipelines
    for ranks in one_batch:
        if (differing := difference({rank: rows[rank].metas for rank in ranks})) is not None:
            path, (first_rank, first_meta), (rank, meta) = differing
            raise BatchError(
                f"ranks have different batches: {path} is {first_meta} on rank {first_rank} and "
                f"{meta} on rank {rank}; {advice}"
            )
    if not any(lengths):
        _check_sample_counts([row.metas for row in rows], advice)
    slots = _agree_on_grad_slots([row.requiring_grad for row in rows], groups.layout.pipelines)
    agreed = [
        AgreedBatch(
            {path: meta for rank in sources for path, meta in rows[rank].metas.items()},
            length,
            {rows[rank].weights for rank in ranks},
        )
        for ranks, sources, length in zip(
            groups.layout.pipelines, itertools.cycle(one_batch), lengths, strict=False
        )
    ]
    return agreed, slots


def check_weights(digests: Sequence[int | None], groups: Groups) -> None:
    """Check that the ranks of each pipeline pass the same weights, of which ``digests`` has one
    number for each pipeline; None if they differ.

    Raises:
        BatchError: equally on all ranks: names the ranks of the pipeline.
    """
    for ranks, digest in zip(groups.layout.pipelines, digests, strict=True):
        if digest is None:
            raise BatchError(
                f"the ranks {list(ranks)}, which are one pipeline, pass different weights: pass "
                "the same weight= on all of them, with one number for each microbatch of theirs"
            )


def _agree_on_lengths(rows: Sequence[OfferedBatch], groups: Groups) -> list[int]:
    """Return for each pipeline the length of its list of microbatches, or 0 for a batch that is
    cut.

    Raises:
        BatchError: the ranks of a pipeline pass lists of different lengths; or some ranks pass a
            list, and some a batch.
    """
    lengths = []
    for ranks in groups.layout.pipelines:
        counts = {r: n for r in ranks if (n := rows[r].microbatches) is not None}
        lengths.append(next(iter(counts.values()), 0))
        for rank, length in counts.items():
            if length != lengths[-1]:
                raise BatchError(
                    f"ranks have different batches: rank {next(iter(counts))} passes "
                    f"{_listed(lengths[-1])}, and rank {rank} passes {_listed(length)}; {_ADVICE}"
                )
    if any(lengths) and 0 in lengths:
        raise BatchError(
            "some replicas of the pipeline pass a list of microbatches, and some a batch: pass "
            "step(microbatches=[...]) on all of them"
        )
    return lengths


def _listed(length: int) -> str:
    return f"a list of {length} microbatches" if length else "a batch"


def _check_sample_counts(metas_by_rank: Sequence[Metas], advice: str) -> None:
    """Raise BatchError if two tensors of the batch have different numbers of samples."""
    counts: dict[int, str] = {}
    for rank, metas in enumerate(metas_by_rank):
        for path, meta in metas.items():
            if isinstance(meta, TensorMeta) and meta.shape:
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
                f"item {number} of the batch's {name} needs a gradient on the ranks {ranks}; "
                "expected exactly one rank of each of the pipelines "
                f"{[*map(list, pipelines)]}, because each of several ranks would get only a part "
                "of the gradient. Let one stage use the tensor and pass it on, or pass the tensor "
                "detached (x.detach())"
            )
    return frozenset(holders)


def digest_of(batch: object) -> int:
    """Return a number of 47 bits, not zero, that is equal on ranks with equal values."""
    digest = hashlib.sha256(repr(batch).encode()).digest()
    return int.from_bytes(digest[:6]) >> 1 or 1


_DIGEST_BYTES = 2**21
"""The most bytes of a tensor that a digest reads, spread over its samples, in the first step."""
_STEP_DIGEST_BYTES = 2**14
"""The most bytes of a tensor that a digest reads in every later step."""


def compare_contents(tensors: Mapping[str, Any], groups: Groups) -> None:
    """Warn on every rank of a pipeline if its ranks have batches of different values; collective.

    A difference is no error, because a tensor that a rank's stages do not use may be a placeholder.

    Args:
        tensors: the batch on this rank, by path; numbers are not compared.
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
