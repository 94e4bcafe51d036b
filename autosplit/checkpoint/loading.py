"""Loads a checkpoint of the whole model into a trainer, however either was cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosplit.checkpoint.state.held_tensors import entries_of, groups_of, tensors_of
from autosplit.checkpoint.storage.folder import DistributedFolder
from autosplit.checkpoint.storage.formats import Reader, open_checkpoint
from autosplit.errors import CheckpointError
from autosplit.pipeline.training.stage_trainer import StageTrainer
from autosplit.torch_internals.dtensor import laid_out, local_tensor

from .naming import Mismatch, ModelTensor, Names, Naming, check_kinds, check_mismatches, source
from .rank_agreement import Ranks
from .state import optimizer_state, run_state

_AT_ONCE = 2**30  # bytes to read before they go where they belong


@dataclass(frozen=True)
class Loaded:
    """What ``load_checkpoint`` found.

    Attributes:
        mismatches: tensors that were missing or too much.
        step: what ``save_checkpoint`` was given; None: nothing.
        extra: likewise; empty: nothing.
        generators: "continued" where they stood, "seeded" anew, or "untouched".
    """

    mismatches: tuple[Mismatch, ...]
    step: int | None
    extra: dict[str, Any]
    generators: run_state.Generators


def read_progress(path: str | Path) -> tuple[int | None, dict[str, Any]]:
    """How far the run of a checkpoint is, and what else it was saved with, before there is a
    trainer: ``step`` and ``extra`` of ``save_checkpoint``, or None and nothing.

    Raises:
        CheckpointError: it cannot be read.
    """
    reader = open_checkpoint(path)
    return run_state.progress(reader.read_run() if isinstance(reader, DistributedFolder) else {})


def load_checkpoint(
    trainer: StageTrainer,
    path: str | Path,
    *,
    names: Names | None = None,
    strict: bool = True,
    optimizer: bool | None = None,
    scheduler: Any = None,
    generators: bool = True,
) -> Loaded:
    """Take up a checkpoint of the whole model, however it was cut; call on all ranks.

    Everything is looked at first, on all ranks: only if none of them finds anything wrong, the
    first tensor is loaded. What ``save_checkpoint`` wrote is compared with its digests (each byte
    is read once more for it), files of ``torch.save`` and folders of torch's own with the
    checksums inside; safetensors have none, there only lengths, shapes and kinds of numbers are
    looked at. Nothing that a checkpoint contains is run, whoever wrote it: of its pickles only
    tensors and plain values are read.

    A run that is resumed on as many ranks with the same stages goes on bit for bit, dropout
    included. On another number of ranks, or with the stages placed in another way, there is
    nobody to go on with a rank's random numbers: there every rank's generators are seeded by the
    saved ones and its rank, so that resuming twice gives the same again.

    Args:
        trainer: between two steps.
        path: see ``open_checkpoint``.
        names: as for ``save_checkpoint``.
        strict: refuse a checkpoint in which tensors are missing or too much.
        optimizer: whether to take up the optimizer's state; None: if it is there.
        scheduler: this rank's learning-rate scheduler, to take up the state of the saved ones;
            None: none, or this rank has no optimizer.
        generators: whether to set torch's random generators of this process, if the checkpoint
            has them.

    Returns:
        What was missing or too much, and the step and the extra that were saved.

    Raises:
        CheckpointError: on every rank, and nothing is loaded on any: a rank cannot read it or
            finds it damaged (it says which rank), tensors are missing, too much or misshapen, or
            the optimizer's or scheduler's state does not fit.
        PipelineError: a rank was lost, or could not read what it had found whole before; the
            trainer has ended.
    """
    ranks = Ranks(trainer, "loading a checkpoint")
    trainer.finish()
    naming = Naming.of_ranks(ranks, names)
    intake = ranks.do(lambda: _Intake(ranks, naming, Path(path), optimizer=optimizer))
    _check_one(ranks.gather(intake.reader.identity), path)
    intake.check(strict=strict)
    run = ranks.do(lambda: intake.run(scheduler, generators=generators))
    ranks.do(intake.verify)
    with ranks.together() as everybody:
        intake.load()
        run.restore()
        everybody.meet()
    return Loaded(intake.mismatches, run.step, run.extra, run.generators)


class _Intake:
    """One rank's share of a checkpoint being loaded."""

    def __init__(self, ranks: Ranks, naming: Naming, path: Path, *, optimizer: bool | None) -> None:
        self._ranks = ranks
        self._naming = naming
        self._path = path
        self._trainer = ranks.trainer
        self.reader = open_checkpoint(path)
        self.mismatches = tuple(naming.mismatches(self.reader.shapes))
        self._tensors = {
            at: (tensor, name)
            for at, tensor in tensors_of(self._trainer, naming.own).items()
            if (name := source(naming.own[at], self.reader.shapes)) is not None
        }
        keys = self._optimizer_keys(required=bool(optimizer)) if optimizer is not False else []
        self._parameters = self._find_parameters(keys) if keys else {}

    def check(self, *, strict: bool) -> None:
        """Refuse what does not fit; collective."""
        self._ranks.do(lambda: check_mismatches(self.mismatches, self._path, strict=strict))
        self._ranks.do(
            lambda: check_kinds(
                ((name, tensor.dtype) for tensor, name in self._tensors.values()),
                self.reader.kinds,
                self._path,
            )
        )
        lacking = [entry.name for entry, found in self._parameters.values() if found is None]
        everywhere = sorted({name for part in self._ranks.gather(lacking) for name in part})
        if everywhere:
            raise CheckpointError(
                f"the checkpoint {self._path} has no optimizer state for {', '.join(everywhere)}: "
                "optimizer=False leaves the optimizer as it is"
            )

    def run(self, scheduler: Any, *, generators: bool) -> run_state.RunState:
        """What there is of the run."""
        found = self.reader.read_run() if isinstance(self.reader, DistributedFolder) else {}
        groups = groups_of(self._trainer, self._naming)
        return run_state.unpack_run(
            found, self._ranks, groups, scheduler=scheduler, generators=generators
        )

    def verify(self) -> None:
        """Find out whether all is as it was written, and the optimizer can take its options."""
        self.reader.verify(name for _, name in self._tensors.values())
        if isinstance(self.reader, DistributedFolder):
            self.reader.verify_optimizer(self._keys())
            # Between them, the ranks look at what none of them reads.
            self.reader.verify_share(self._ranks.number, self._ranks.count)
            options = [key for key in self._keys() if optimizer_state.is_option(key)]
            if self._trainer.optimizer is not None and options:
                flat = self.reader.read_optimizer(options)
                optimizer_state.check_groups(self._trainer.optimizer, self._called(), flat)

    def load(self) -> None:
        """Fill the tensors and the optimizer."""
        _fill([*self._tensors.values()], self.reader)
        keys = self._keys()
        if keys and self._trainer.optimizer and isinstance(self.reader, DistributedFolder):
            flat = self.reader.read_optimizer(keys)
            optimizer_state.restore_optimizer(self._trainer.optimizer, self._called(), flat)

    def _keys(self) -> list[str]:
        found = (found for _, found in self._parameters.values() if found is not None)
        return list(dict.fromkeys(key for _, keys in found for key in keys))

    def _called(self) -> dict[int, str]:
        return {key: found[0] for key, (_, found) in self._parameters.items() if found is not None}

    def _optimizer_keys(self, *, required: bool) -> list[str]:
        reader = self.reader
        keys = list(reader.optimizer) if isinstance(reader, DistributedFolder) else []
        if required and not keys:
            raise CheckpointError(f"the checkpoint {self._path} has no optimizer state")
        return keys

    def _find_parameters(
        self, keys: Sequence[str]
    ) -> dict[int, tuple[ModelTensor, tuple[str, list[str]] | None]]:
        """For each parameter of the optimizer, by ``id``: what it is, and what there is."""
        entries = entries_of(self._trainer, self._naming)
        optimizer = self._trainer.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        trained = [id(p) for group in groups for p in group["params"]]
        return {
            key: (entries[key], optimizer_state.wanted(entries[key].names, keys)) for key in trained
        }


@torch.no_grad()
def _fill(wanted: Sequence[tuple[Tensor, str]], reader: Reader) -> None:
    """Read what there is for tensors, a part at a time."""
    part: list[tuple[Tensor, str]] = []
    size = 0
    for number, (tensor, name) in enumerate(wanted, 1):
        part.append((tensor, name))
        size += tensor.nbytes
        if size >= _AT_ONCE or number == len(wanted):
            values = reader.read(dict.fromkeys(name for _, name in part))
            for target, known in part:
                local_tensor(target).copy_(local_tensor(laid_out(values[known], target)))
            part, size = [], 0


def _check_one(identities: Sequence[str], path: str | Path) -> None:
    other = [str(rank) for rank, each in enumerate(identities) if each != identities[0]]
    if other:
        raise CheckpointError(
            f"rank {', '.join(other)} sees another checkpoint at {path} than rank 0: all ranks "
            "must read the same, and nothing may save there meanwhile"
        )
