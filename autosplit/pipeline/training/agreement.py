"""What all ranks of a trainer must have alike: options, meshes, and batches."""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autosplit.errors import BatchError, PipelineError
from autosplit.mesh.dimensions import RankLayout
from autosplit.pipeline.engine.default_group import gather
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.shapes import TensorMeta, listed
from autosplit.pipeline.engine.stages import SplitStage, StageFactory
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Wiring

_OF_STAGES = ("backend", "accumulation", "grad_dtype")
_OF_GRAPHS = ("memory", "overlap")


def check_unanimous(said: Mapping[str, Any], groups: Groups) -> None:
    """Hold what this rank was told against what the others were; collective.

    Without it, some would clip and others not, or wait for a message that nobody sends.

    Args:
        said: by name; the same names on every rank.
        groups: the trainer's process groups.

    Raises:
        PipelineError: names the first difference and the ranks.
    """
    heard = groups.everybody.gather({name: _text(value) for name, value in said.items()})
    for name in said:
        first = heard[0][name]
        for rank, other in enumerate(part[name] for part in heard):
            if other != first:
                raise PipelineError(
                    f"every rank must build the same trainer, but {name} is {first} on rank 0 and "
                    f"{other} on rank {rank}"
                )


def check_layout(layout: RankLayout) -> None:
    """Refuse meshes that differ, and one that only some ranks have, over the default process group:
    the trainer's are made by them. Does nothing for a trainer of one rank.

    Raises:
        PipelineError: names two ranks and what they were given.
    """
    if len(layout.ranks) == 1:
        return
    heard = gather((layout.device_type, layout.pipelines, tuple(map(tuple, layout.places))))
    kind, pipelines, places = heard[0]
    for rank, (other_kind, others, other_places) in enumerate(heard):
        if (others, other_places) != (pipelines, places):
            what = f"its pipelines are {pipelines} on rank 0 and {others} on rank {rank}"
            if others == pipelines:
                what = (
                    f"its pipelines are at the places {places} along 'dp_replicate', "
                    f"'dp_shard' and 'tp' on rank 0 and {other_places} on rank {rank}"
                )
            if not (kind and other_kind):
                what = f"rank {rank if kind else 0} has none: {what}"
            raise PipelineError(f"every rank must be given the same mesh, but {what}")


def _text(value: object) -> str:
    if isinstance(value, Schedule):
        order = _digest(value.ranks, value.placement, value.mirror)
        return f"{value.name!r} (split_backward={value.split_backward}, order {order})"
    if isinstance(value, Wiring):
        return f"one of order {_digest(value)}"
    return repr(value)


def factory_options(factory: StageFactory, *, shared: bool = False) -> dict[str, Any]:
    """Those options of the stages that change results; of another factory, that it is one.

    ``memory`` and ``overlap`` change no bit, and may be a rank's own, unless ranks
    share tensors: then their graphs must have the same collectives in the same order.

    Args:
        factory: makes a stage.
        shared: whether ranks share the tensors of a stage.
    """
    names = (*_OF_STAGES, *(_OF_GRAPHS if shared else ()))
    if not isinstance(factory, SplitStage):
        return {"stage_factory": "given", **dict.fromkeys(names)}
    return {"stage_factory": None, **{name: getattr(factory, name) for name in names}}


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]


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
    """Have all ranks take a batch, or none of them; collective, unless ``known`` and not ``waits``,
    where it is called for a batch that is refused only.

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
    alone = everybody.ranks == 1
    if known and not waits and not alone:
        raise PipelineError(refused)
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
