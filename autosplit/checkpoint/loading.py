"""Checkpoints under the names of the whole model: any cut of it loads what any other saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosplit.checkpoint import optimizer_state
from autosplit.checkpoint.formats import DistributedFolder, Reader, open_checkpoint, unworried
from autosplit.checkpoint.naming import (
    Entry,
    Mismatch,
    Names,
    Naming,
    check,
    gather,
    is_alone,
    persistent,
    source,
)
from autosplit.errors import CheckpointError
from autosplit.pipeline.training.shared import Holder
from autosplit.pipeline.training.trainer import PipelineTrainer

_AT_ONCE = 2**30  # bytes to read before they go where they belong


def save_checkpoint(
    trainer: PipelineTrainer, path: str | Path, *, names: Names | None = None
) -> None:
    """Write all parameters, persistent buffers and the optimizer's state; call on all ranks.

    The folder is one of torch.distributed.checkpoint, as for the model that is not cut:
    ``{"model": ..., "optimizer": ...}``, the latter flattened. Each rank writes its own stages;
    tied parameters are there under each of their names, as in the model's ``state_dict``.

    Args:
        trainer: between two steps.
        path: a folder that all ranks see; what was there is replaced.
        names: the whole model's name for what a stage calls ``name``: ``names(stage, name)``;
            needed for stages that were not cut from one model.

    Raises:
        CheckpointError: two stages use one name for different parameters, or the optimizer keeps
            something that has no place here.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    naming = Naming.of_trainer(trainer, names)
    # Not every holder of a tied parameter writes it, only its home, under all its names; of two
    # copies of a stage the first.
    first = [stage for stage, at in enumerate(trainer.schedule.placement) if at == trainer.rank]
    homes = {
        at: entry for at, entry in naming.own.items() if at[0] == entry.home and at[0] in first
    }
    tensors = _tensors(trainer, homes)
    named = {name: tensors[at] for at, entry in homes.items() for name in entry.names}
    state: dict[str, Any] = {"model": named}
    if trainer.optimizer is not None:
        called = {id(tensors[at]): entry.name for at, entry in homes.items()}
        state["optimizer"] = optimizer_state.flatten(trainer.optimizer, called)
    with unworried():
        save(state, checkpoint_id=path, no_dist=is_alone(trainer))


def load_checkpoint(
    trainer: PipelineTrainer,
    path: str | Path,
    *,
    names: Names | None = None,
    strict: bool = True,
    optimizer: bool | None = None,
) -> tuple[Mismatch, ...]:
    """Take up a checkpoint of the whole model, however it was cut; call on all ranks.

    Args:
        trainer: between two steps.
        path: see ``open_checkpoint``.
        names: as for ``save_checkpoint``.
        strict: refuse a checkpoint in which tensors are missing or too much.
        optimizer: whether to take up the optimizer's state; None: if it is there.

    Returns:
        What was missing or too much.

    Raises:
        CheckpointError: it cannot be read, or tensors are missing, too much or misshapen: nothing
            is loaded then on any rank; or the optimizer's state does not fit.
    """
    naming = Naming.of_trainer(trainer, names)
    reader = open_checkpoint(path)
    mismatches = naming.mismatches(reader.shapes)
    check(mismatches, path, strict=strict)
    flat = _optimizer_keys(reader, path, required=bool(optimizer)) if optimizer is not False else []
    plans = _parameters_in(naming, trainer, flat) if flat else {}
    lacking = [Mismatch(e.name, tuple(e.shape), None) for e, found in plans.values() if not found]
    everywhere = [m for part in gather(trainer, lacking) for m in part]
    if everywhere:
        listed = ", ".join(sorted({mismatch.name for mismatch in everywhere}))
        raise CheckpointError(
            f"the checkpoint {path} has no optimizer state for {listed}: optimizer=False leaves "
            "the optimizer as it is"
        )
    _fill(_tensors(trainer, naming.own), naming, reader)
    if plans and trainer.optimizer is not None and isinstance(reader, DistributedFolder):
        keys = [key for _, found in plans.values() if found for key in found[1]]
        called = {key: found[0] for key, (_, found) in plans.items() if found}
        optimizer_state.restore(trainer.optimizer, called, reader.read_optimizer(keys))
    return tuple(mismatches)


@torch.no_grad()
def _fill(tensors: dict[Holder, Tensor], naming: Naming, reader: Reader) -> None:
    """Read what there is for ``tensors``, a part at a time."""
    part: dict[Holder, str] = {}
    size = 0
    for number, (at, tensor) in enumerate(tensors.items(), 1):
        if (name := source(naming.own[at], reader.shapes)) is not None:
            part[at] = name
            size += tensor.nbytes
        if size >= _AT_ONCE or number == len(tensors):
            values = reader.read(dict.fromkeys(part.values()))
            for holder, known in part.items():
                tensors[holder].copy_(values[known])
            part, size = {}, 0


def _tensors(trainer: PipelineTrainer, holders: dict[Holder, Entry]) -> dict[Holder, Tensor]:
    """The tensors of this rank's ``holders``."""
    found = {stage: persistent(module) for stage, module in trainer.modules.items()}
    return {(stage, name): found[stage][name] for stage, name in holders}


def _optimizer_keys(reader: Reader, path: str | Path, *, required: bool) -> list[str]:
    keys = list(reader.optimizer) if isinstance(reader, DistributedFolder) else []
    if required and not keys:
        raise CheckpointError(f"the checkpoint {path} has no optimizer state")
    return keys


def _parameters_in(
    naming: Naming, trainer: PipelineTrainer, keys: Sequence[str]
) -> dict[int, tuple[Entry, tuple[str, list[str]] | None]]:
    """For each parameter of this rank's optimizer, by ``id``: what it is, and what there is."""
    tensors = _tensors(trainer, naming.own)
    entries = {id(tensors[at]): entry for at, entry in naming.own.items()}
    groups = trainer.optimizer.param_groups if trainer.optimizer is not None else []
    trained = [id(p) for group in groups for p in group["params"]]
    return {
        key: (entries[key], optimizer_state.wanted(entries[key].names, keys)) for key in trained
    }
