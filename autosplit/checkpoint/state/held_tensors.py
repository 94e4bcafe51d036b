"""The tensors of a trainer that a checkpoint has, and the groups of its optimizer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from autosplit.checkpoint.naming import ModelTensor, Naming, persistent
from autosplit.pipeline.training.shared_parameters import Holder
from autosplit.pipeline.training.stage_trainer import StageTrainer


def tensors_of(trainer: StageTrainer, holders: Iterable[Holder]) -> dict[Holder, Tensor]:
    """The tensors of this rank's ``holders``."""
    found = {stage: persistent(module) for stage, module in trainer.modules.items()}
    return {(stage, name): found[stage][name] for stage, name in holders}


def entries_of(trainer: StageTrainer, naming: Naming) -> dict[int, ModelTensor]:
    """What this rank's tensors are in the whole model, by ``id``."""
    tensors = tensors_of(trainer, naming.own)
    return {id(tensors[at]): entry for at, entry in naming.own.items()}


def groups_of(trainer: StageTrainer, naming: Naming) -> list[list[tuple[str, ...]]]:
    """For each group of this rank's optimizer, for each of its parameters, all its names."""
    entries = entries_of(trainer, naming)
    groups = trainer.optimizer.param_groups if trainer.optimizer is not None else []
    return [[entries[id(p)].names for p in group["params"]] for group in groups]
