"""Load a whole-model checkpoint into a trainer, whatever the cuts of the saving and the loading
trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autosplit.backends.backend import collecting_new_objects_only
from autosplit.errors import CheckpointError

from . import run_state
from .naming import Names, Naming
from .ranks import Ranks
from .reading import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from autosplit.trainer.trainer import PipelineTrainer


@dataclass(frozen=True)
class Loaded:
    """The result of ``load_checkpoint``.

    Attributes:
        missing_keys: names of tensors of the model that the checkpoint lacks.
        unexpected_keys: names of tensors of the checkpoint that the model lacks.
        step: the ``step`` passed to ``save_checkpoint``; None without one.
        extra: the ``extra`` passed to ``save_checkpoint``; may be empty.
        generators: how random generators were set: "continued" from their saved states, "seeded"
            anew, or "untouched".
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    step: int | None
    extra: dict[str, Any]
    generators: run_state.Generators


def read_progress(path: str | Path) -> tuple[int | None, dict[str, Any]]:
    """Read (``step``, ``extra``) of a checkpoint without a trainer; (None, {}) if it has none.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    run = run_state.whole_run(_run(open_checkpoint(path)))
    return run.get("step"), run.get("extra", {})


def read_planning(
    path: str | Path | Checkpoint, stages: int | None = None
) -> dict[str, Any] | None:
    """Read how the trainer of a checkpoint cut its model, for ``StageOptions(planning=...)``: the
    measured costs of its blocks, and the cuts.

    Args:
        path: see ``read_checkpoint``.
        stages: the number of stages to cut into. If it is None or differs from the checkpoint's
            number, only the costs are returned, and the trainer finds new cuts for them.

    Returns:
        The value for ``planning=``; None if the trainer of the checkpoint did not cut its model.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    planning: dict[str, Any] | None
    planning = run_state.whole_run(_run(open_checkpoint(path))).get("planning")
    if planning is not None and len(planning["cut_at"]) + 1 != stages:
        return {"costs": planning["costs"]}
    return planning


@collecting_new_objects_only()
def load_checkpoint(
    trainer: PipelineTrainer,
    path: str | Path | Checkpoint,
    *,
    names: Names | None = None,
    strict: bool = True,
    optimizer: bool | None = None,
    scheduler: Any = None,
    generators: bool = True,
) -> Loaded:
    """Load a whole-model checkpoint into a trainer with any cuts; call on all ranks. Gradients of
    ``forward_backward`` that no step has used are dropped.

    All ranks verify everything before the first tensor is loaded. Checkpoints of
    ``save_checkpoint`` are compared with their digests (which reads each byte twice), files of
    ``torch.save`` and folders of torch.distributed.checkpoint with their checksums. Safetensors
    have no checksums: only lengths, shapes and kinds of numbers are verified. No code in a
    checkpoint is ever run: its pickles may contain tensors and plain values only.

    A run that is resumed with the same stages continues bit for bit, dropout included. The number
    of ranks must be the same, unless all ranks had equal seeds. If ranks had different seeds and
    their number changes, or if the stages are cut in another way, each rank's generators are seeded
    from the saved states and its rank. So resuming twice gives the same result.

    Args:
        trainer: the trainer, between two steps.
        path: see ``read_checkpoint``.
        names: as for ``save_checkpoint``.
        strict: whether to refuse a checkpoint with missing or unexpected tensors.
        optimizer: whether to load the optimizer's state; None: load it if the checkpoint has it.
        scheduler: this rank's learning-rate scheduler, whose state is loaded; None if there is
            none, or if this rank has no optimizer.
        generators: whether to set torch's random generators of this process, if the checkpoint
            has them.

    Returns:
        Missing and unexpected tensors, the saved ``step`` and ``extra``, and how generators were
        set.

    Raises:
        CheckpointError: on every rank, before anything is loaded: a rank cannot read the checkpoint
            or finds it damaged (the error says which), tensors are missing, unexpected or of
            another shape, or the optimizer's or scheduler's state does not fit.
        PipelineError: a rank was lost, or could not read a verified part a second time; the trainer
            has ended.
    """
    ranks = Ranks(trainer, "loading a checkpoint")
    naming = Naming.of_ranks(ranks, names)
    checkpoint = ranks.do(lambda: open_checkpoint(path))
    _check_one(ranks.gather(checkpoint.identity), checkpoint.path)
    missing, unexpected = ranks.do(lambda: naming.compare(checkpoint, strict=strict))
    sources = [(tensor, entry.checkpoint_name(checkpoint.model)) for tensor, entry in naming.local]
    model = [(tensor, checkpoint.model[name]) for tensor, name in sources if name is not None]
    if optimizer is None:  # in any form: a state that cannot be loaded must not be ignored silently
        optimizer = any(
            key.partition(".")[2].startswith("param_groups") for key in checkpoint.under("")
        )
    restored = trainer.optimizer if optimizer else None

    def verify_all() -> tuple[run_state.RunState, list[run_state.FoundGroup]]:
        for _, key in model:
            checkpoint.verify(key)
        run = run_state.unpack_run(
            _run(checkpoint), ranks, naming.groups, scheduler=scheduler, generators=generators
        )
        if restored is None:
            return run, []
        return run, run_state.find_optimizer(checkpoint, restored, naming.groups, run.groups)

    run, states = ranks.do(verify_all)
    with trainer.together(ranks.doing) as groups, torch.no_grad():
        for tensor, key in model:
            checkpoint.fill(key, tensor)
        for module in trainer.modules.values():
            module.zero_grad(set_to_none=True)  # of forward_backward, for other values
        if restored is not None:
            run_state.restore_optimizer(checkpoint, restored, naming.groups, states)
        for restore in run.restore:
            restore()
        groups.everybody.barrier()
    return Loaded(missing, unexpected, run.step, run.extra, run.generators)


def _run(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint's entries about the run: step, extra, scheduler and generators."""
    return {name: checkpoint.read(key) for name, key in checkpoint.under("autosplit.").items()}


def _check_one(identities: list[str], path: Path) -> None:
    different = [str(rank) for rank, identity in enumerate(identities) if identity != identities[0]]
    if different:
        raise CheckpointError(
            f"rank {', '.join(different)} sees another checkpoint at {path} than rank 0: all ranks "
            "must read the same files, and no save to this path may run during the load"
        )
