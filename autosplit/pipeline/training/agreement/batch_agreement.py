"""Whether all ranks were given the same batch, as far as its tensors' sizes and dtypes tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.execution.microbatch import listed
from autosplit.pipeline.engine.messages.process_groups import Groups
from autosplit.pipeline.engine.messages.shape_negotiation import TensorMeta

Parts: TypeAlias = "Mapping[str, Sequence[TensorMeta | None]]"
"""What a rank was given: ``inputs`` and ``targets``, each if it was; None for a tensor left out."""

_ADVICE = "give every rank the same batch, or leave out (None) what its stages do not take"
_ADVICE_TO_REPLICAS = (
    "give every rank of a replica the replica's share of the batch, and each replica as many "
    "samples, as a DistributedSampler and a DataLoader with drop_last=True do"
)


def check_same_batch(parts: Parts, groups: Groups) -> None:
    """Hold what this rank was given against what the others were; collective.

    Without it, a loss of 4 samples' outputs and 8 samples' targets may well broadcast. Replicas of
    the pipeline have samples of their own, as many as each other: the mean of their gradients is
    that of all samples.

    Args:
        parts: what this rank was given.
        groups: the trainer's process groups.

    Raises:
        PipelineError: names two ranks and what they have.
    """
    everywhere: list[Parts] = groups.everybody.gather(dict(parts))
    advice = _ADVICE if groups.layout.shares == 1 else _ADVICE_TO_REPLICAS
    for name in ("inputs", "targets"):
        given = [(rank, parts[name]) for rank, parts in enumerate(everywhere) if parts.get(name)]
        for rank, part in given[1:]:
            first, other = given[0]
            if not _agree(other, part):
                raise PipelineError(
                    f"the ranks were given different batches: the {name} are {listed(other)} on "
                    f"rank {first} and {listed(part)} on rank {rank}; {advice}"
                )
    _check_samples(everywhere, advice)


def _agree(one: Sequence[TensorMeta | None], other: Sequence[TensorMeta | None]) -> bool:
    """Whether two ranks may have been given parts of the same; either may lack tensors."""
    if len(one) != len(other) and None not in (*one, *other):
        return False
    pairs = zip(one, other, strict=False)
    return all(a == b for a, b in pairs if a is not None and b is not None)


def _check_samples(everywhere: Sequence[Parts], advice: str) -> None:
    """Where no rank was given all of the batch, at least the samples must be as many."""
    found = [_tensors(parts) for parts in everywhere]
    every = {place: (rank, meta) for rank, own in enumerate(found) for place, meta in own.items()}
    if any(own.keys() == every.keys() for own in found):
        return
    counts = {
        meta.shape[0]: f"{name} of {meta.shape[0]} samples on rank {rank}"
        for (name, _), (rank, meta) in every.items()
    }
    if len(counts) > 1:
        raise PipelineError(
            f"the ranks were given different batches: {' and '.join(counts.values())}; {advice}, "
            "or give one rank all of it if it is meant so"
        )


def _tensors(parts: Parts) -> dict[tuple[str, int], TensorMeta]:
    return {
        (name, place): meta
        for name, part in parts.items()
        for place, meta in enumerate(part)
        if meta is not None
    }
