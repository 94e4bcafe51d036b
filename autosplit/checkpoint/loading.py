"""Loads a checkpoint of the whole model into a trainer, however either was cut."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autosplit.errors import CheckpointError

from . import run_state
from .naming import Names, Naming
from .ranks import Ranks
from .reading import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from autosplit.pipeline.trainer import PipelineTrainer


@dataclass(frozen=True)
class Loaded:
    """What ``load_checkpoint`` found.

    Attributes:
        missing_keys: tensors of the model that were not there.
        unexpected_keys: tensors that were there, and that the model does not have.
        step: what ``save_checkpoint`` was given; None: nothing.
        extra: likewise; empty: nothing.
        generators: "continued" where they stood, "seeded" anew, or "untouched".
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
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
    """Take up a checkpoint of the whole model, however it was cut; call on all ranks. Gradients of
    ``forward_backward`` that no step has taken are dropped.

    Everything is looked at first, on all ranks: only if none of them finds anything wrong, the
    first tensor is loaded. What ``save_checkpoint`` wrote is compared with its digests (each byte
    is read once more for it), files of ``torch.save`` and folders of torch's own with the
    checksums inside; safetensors have none, there only lengths, shapes and kinds of numbers are
    looked at. Nothing that a checkpoint contains is run, whoever wrote it: of its pickles only
    tensors and plain values are read.

    A run that is resumed on as many ranks with the same stages goes on bit for bit, dropout
    included. On another number of ranks, or with the stages cut or placed in another way, there is
    nobody to go on with a rank's random numbers: there every rank's generators are seeded by the
    saved ones and its rank, so that resuming twice gives the same again.

    Args:
        trainer: between two steps.
        path: see ``read_checkpoint``.
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
    naming = Naming.of_ranks(ranks, names)
    found = ranks.do(lambda: open_checkpoint(path))
    _check_one(ranks.gather(found.identity), path)
    missing, more = ranks.do(lambda: naming.compare(found, strict=strict))
    sources = [(tensor, entry.source(found.model)) for tensor, entry in naming.own]
    model = [(tensor, found.model[name]) for tensor, name in sources if name is not None]
    if optimizer is None:  # in whatever form: one that cannot be taken up is not left out silently
        optimizer = any(key.partition(".")[2].startswith("param_groups") for key in found.under(""))
    taking = trainer.optimizer if optimizer else None

    def look() -> tuple[run_state.RunState, list[run_state.FoundGroup]]:
        for _, key in model:
            found.verify(key)
        run = run_state.unpack_run(
            _run(found), ranks, naming.groups, scheduler=scheduler, generators=generators
        )
        if taking is None:
            return run, []
        return run, run_state.find_optimizer(found, taking, naming.groups, run.groups)

    run, states = ranks.do(look)
    with trainer.together(ranks.doing) as groups, torch.no_grad():
        for tensor, key in model:
            found.fill(key, tensor)
        for module in trainer.modules.values():
            module.zero_grad(set_to_none=True)  # of forward_backward, for other values
        if taking is not None:
            run_state.restore_optimizer(found, taking, naming.groups, states)
        for restore in run.restore:
            restore()
        groups.everybody.meet()
    return Loaded(missing, more, run.step, run.extra, run.generators)


def _run(found: Checkpoint) -> dict[str, Any]:
    """What a checkpoint has of a run."""
    return {name: found.read(key) for name, key in found.under("autosplit.").items()}


def _check_one(identities: list[str], path: str | Path) -> None:
    other = [str(rank) for rank, each in enumerate(identities) if each != identities[0]]
    if other:
        raise CheckpointError(
            f"rank {', '.join(other)} sees another checkpoint at {path} than rank 0: all ranks "
            "must read the same, and nothing may save there meanwhile"
        )
