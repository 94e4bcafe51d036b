"""Whether all ranks take the batch, and the same one as far as its sizes and dtypes tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from autosplit.errors import BatchError, PipelineError
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.shapes import TensorMeta, listed

Parts: TypeAlias = "Mapping[str, Sequence[TensorMeta | None]]"
"""What a rank was given: ``inputs`` and ``targets``, each if it was; None for a tensor left out."""

_ADVICE = "give every rank the same batch, or leave out (None) what its stages do not take"
_ADVICE_TO_REPLICAS = (
    "give every rank of a replica the replica's share of the batch, and each replica as many "
    "samples, as a DistributedSampler and a DataLoader with drop_last=True do"
)


def agree_on_batch(
    refused: str, parts: Parts, groups: Groups, *, known: bool, waits: bool = True
) -> None:
    """Have all ranks take a batch, or none of them; collective, unless ``known`` and not ``waits``.

    Without it, ranks would wait for one that refuses, and a loss of 4 samples' outputs and 8
    samples' targets may well broadcast.

    Args:
        refused: why this rank takes no such batch; empty where it does.
        parts: what it was given.
        groups: the trainer's process groups.
        known: whether all have taken a batch like this one before.
        waits: whether ranks wait for each other then, too.

    Raises:
        BatchError: on every rank: one refuses it, or two were given different batches.
        PipelineError: this rank refuses it, and others have not waited.
    """
    everybody = groups.everybody
    if known and not waits and everybody.ranks > 1:
        if refused:
            raise PipelineError(refused)
        return
    if known and not everybody.sum(torch.tensor([float(bool(refused))], device="cpu")):
        return
    said: list[tuple[str, Parts]] = everybody.gather((refused, dict(parts)))
    for rank, (text, _) in enumerate(said):
        if text:
            raise BatchError(refused or f"rank {rank} refuses its batch: {text}")
    _check_same([each for _, each in said], groups)


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
