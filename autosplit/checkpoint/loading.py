"""Loads a checkpoint of the whole model into a trainer, however either was cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autosplit.errors import CheckpointError
from autosplit.torch_internals.dtensor import laid_out, local_tensor

from . import optimizer_state, run_state
from .files import Checkpoint, read_all
from .folder import open_checkpoint
from .naming import Mismatch, ModelTensor, Names, Naming, tensors_of, trained
from .ranks import Ranks

if TYPE_CHECKING:
    from autosplit.pipeline.trainer import PipelineTrainer


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
    return run_state.progress(_run(open_checkpoint(path)))


def load_checkpoint(
    trainer: PipelineTrainer,
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
    _check_one(ranks.gather(intake.found.identity), path)
    mismatches = intake.check(strict=strict)
    run = ranks.do(lambda: intake.run(scheduler, generators=generators))
    ranks.do(intake.verify)
    with ranks.together() as everybody:
        intake.load()
        for restore in run.restore:
            restore()
        everybody.meet()
    return Loaded(mismatches, run.step, run.extra, run.generators)


class _Intake:
    """One rank's share of a checkpoint being loaded."""

    def __init__(self, ranks: Ranks, naming: Naming, path: Path, *, optimizer: bool | None) -> None:
        self._ranks = ranks
        self._naming = naming
        self._trainer = ranks.trainer
        self.found = open_checkpoint(path)
        self._tensors = [
            (tensor, name)
            for at, tensor in tensors_of(self._trainer, naming.own).items()
            if (name := naming.own[at].source(self.found.model)) is not None
        ]
        self._groups = trained(self._trainer, naming)
        if optimizer and not self.found.optimizer:
            raise CheckpointError(f"the checkpoint {path} has no optimizer state")
        takes = self.found.optimizer and optimizer is not False
        self._find({k: e for group in self._groups for k, e in group.items()} if takes else {})

    def _find(self, entries: Mapping[int, ModelTensor]) -> None:
        """Where the optimizer's parameters are: each under the first of its names that has
        options.
        """
        known = {name for entry in entries.values() for name in entry.names}
        there = optimizer_state.find(self.found.optimizer, known)
        there = {name: kinds for name, kinds in there.items() if optimizer_state.OPTIONS in kinds}
        found = {key: entry.source(there) for key, entry in entries.items()}
        self._lacking = [entries[key].name for key, name in found.items() if name is None]
        self._called = {key: name for key, name in found.items() if name is not None}
        self._places = {name: there[name] for name in self._called.values()}

    def check(self, *, strict: bool) -> tuple[Mismatch, ...]:
        """Refuse what does not fit; collective. Gives what is missing or too much."""
        mismatches = self._ranks.do(lambda: self._naming.fitting(self.found, strict=strict))
        everywhere = sorted({n for part in self._ranks.gather(self._lacking) for n in part})
        if everywhere:
            raise CheckpointError(
                f"the checkpoint {self.found.path} has no optimizer state for "
                f"{', '.join(everywhere)}: optimizer=False leaves the optimizer as it is"
            )
        return mismatches

    def run(self, scheduler: Any, *, generators: bool) -> run_state.RunState:
        """What there is of the run."""
        return run_state.unpack_run(
            _run(self.found), self._ranks, self._groups, scheduler=scheduler, generators=generators
        )

    def verify(self) -> None:
        """Find out whether all is as it was written, and the optimizer can take its options."""
        for _, name in self._tensors:
            self.found.model[name].verify()
        for kinds in self._places.values():
            for entry in chain.from_iterable(each.values() for each in kinds.values()):
                entry.verify()
        if self._trainer.optimizer is not None and self._places:
            options = optimizer_state.read(self._places, optimizer_state.OPTIONS)
            optimizer_state.check_groups(self._trainer.optimizer, self._called, options)

    @torch.no_grad()
    def load(self) -> None:
        """Fill the tensors and the optimizer."""
        for tensor, name in self._tensors:
            value = self.found.model[name].read()
            local_tensor(tensor).copy_(local_tensor(laid_out(value, tensor)))
        if self._trainer.optimizer is not None and self._places:
            kinds = (optimizer_state.STATE, optimizer_state.OPTIONS)
            state, options = (optimizer_state.read(self._places, kind) for kind in kinds)
            optimizer_state.restore_optimizer(self._trainer.optimizer, self._called, state, options)


def _run(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint has of a run, verified."""
    return dict(zip(checkpoint.run, read_all(checkpoint.run.values()), strict=True))


def _check_one(identities: Sequence[str], path: str | Path) -> None:
    other = [str(rank) for rank, each in enumerate(identities) if each != identities[0]]
    if other:
        raise CheckpointError(
            f"rank {', '.join(other)} sees another checkpoint at {path} than rank 0: all ranks "
            "must read the same, and nothing may save there meanwhile"
        )
