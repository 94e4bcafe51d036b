"""Save a trainer under the names of the whole model, so that a trainer with any other cuts can load
it.

    path/.metadata          names the files of the checkpoint, and is renamed into place last
    path/save-NUMBER/...    the files of one save

Each save writes its files into a new folder and never renames them. Only the ``.metadata`` is
renamed, which replaces the old checkpoint by the new in one step. So a reader finds either the old
or the new checkpoint, whenever a save is killed. The next successful save removes leftovers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autosplit.errors import CheckpointError
from autosplit.ranks.control import Control
from autosplit.text.files import sync_folder
from autosplit.torch_internals.pytree import tree_map

from . import run_state
from .naming import Names, Naming
from .ranks import Ranks, describe, joined
from .reading import METADATA, SAVED

if TYPE_CHECKING:
    from autosplit.trainer.trainer import PipelineTrainer


class PendingSave:
    """An asynchronous save, whose tensors are copied to the host and written by a thread.

    Args:
        work: a function that writes the tensors; it returns the error, or None.
    """

    def __init__(self, work: Callable[[], CheckpointError | None]) -> None:
        self._work = work
        self._error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, name="autosplit-save", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save has ended on this rank, successfully or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is written.

        Raises:
            CheckpointError: the save failed; the old checkpoint is unchanged. Raised once.
        """
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            self._error = self._work()
        except BaseException as error:
            self._error = CheckpointError(f"the save was interrupted: {error}")
            self._error.__cause__ = error


def save_checkpoint(
    trainer: PipelineTrainer,
    path: str | Path,
    *,
    names: Names | None = None,
    scheduler: Any = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> PendingSave | None:
    """Save a trainer's parameters, persistent buffers, optimizer and random generators, with
    ``scheduler``, ``step`` and ``extra``; call on all ranks.

    The folder has the format of torch.distributed.checkpoint, as for the uncut model: ``{"model":
    ..., "optimizer": ...}``, with a flattened optimizer, and "autosplit" for the other state.
    SHA-256 digests are in its metadata. Each rank writes its own stages. Tied parameters are saved
    under each of their names, as in the model's ``state_dict``.

    The old checkpoint at ``path`` is kept until all ranks have written and all files are on disk;
    then it is replaced in one step. If the save fails or is killed before that, the old checkpoint
    is unchanged, and the next save removes the leftovers. A rank waits for other ranks for at most
    the trainer's ``timeout``. A failed save does not end the trainer, unless a rank died.

    With ``asynchronous``, each rank copies its tensors to the host and returns, while a thread
    writes them and uses a separate process group. Later steps do not change the copies. One save
    runs at a time: the next save, a load and ``close()`` wait for the pending save. They also raise
    the error of a failed save, unless ``wait()`` has raised it.

    Args:
        trainer: the trainer, between two steps.
        path: a folder that all ranks see.
        names: ``names(stage, name)`` returns the whole-model name of a stage's tensor; needed for
            stages that were not cut from one model.
        scheduler: this rank's learning-rate scheduler over ``trainer.optimizer``, or another object
            with ``state_dict`` and ``load_state_dict``; None on ranks without an optimizer.
        step: the number of steps so far, to be returned by ``load_checkpoint``; equal on all ranks.
        extra: tensors and plain values (numbers, strings, lists, dictionaries) of the run, such as
            a data loader's state; rank 0's are saved.
        asynchronous: whether to return while the files are written.

    Returns:
        With ``asynchronous``, the pending save; else None.

    Raises:
        CheckpointError: on every rank: a rank cannot write (the error says which), two stages use
            one name for different parameters, there are gradients that no step has used, or a value
            is neither a tensor nor plain.
        PipelineError: a rank was lost.
    """
    ranks = Ranks(trainer, "saving a checkpoint")
    naming = Naming.of_ranks(ranks, names)

    def run_and_tensors() -> dict[str, Any]:
        if any(trainer.gradients().values()):
            raise CheckpointError(
                "there are gradients of forward_backward that no step has used, and a checkpoint "
                "has no gradients: save after step(), or set every .grad to None"
            )
        run = run_state.pack_run(ranks, naming.groups, scheduler=scheduler, step=step, extra=extra)
        content = {"autosplit": run, **_state(ranks, naming)}
        return tree_map(_copied, content) if asynchronous else content

    content = ranks.do(run_and_tensors)
    requests = ranks.gather((str(path), step, secrets.token_hex(8)))
    paths, steps, numbers = zip(*requests, strict=True)
    for argument, values in (("folder", paths), ("step", steps)):
        if len({*values}) > 1:
            raise CheckpointError(
                f"pass the same {argument} on all ranks; the ranks passed {[*values]}"
            )
    writer = _StagedWriter(Path(path), numbers[0])
    with trainer.together(ranks.doing) as groups:
        if not asynchronous:
            error = _write(content, writer, groups.everybody)
        else:
            apart = groups.background_control()
    if asynchronous:
        pending = PendingSave(lambda: _write(content, writer, apart))
        trainer.finish(pending.wait)
        return pending
    if error is not None:
        raise error
    return None


def _state(ranks: Ranks, naming: Naming) -> dict[str, Any]:
    """This rank's tensors of model and optimizer; empty unless the rank is in the first replica. If
    several ranks have copies of a tensor, torch's planner writes the copy of the lowest rank.
    """
    if ranks.place.replicate:
        return {}
    optimizer = ranks.trainer.optimizer
    model = {name: tensor for tensor, entry in naming.local for name in entry.names}
    state = run_state.flatten_optimizer(optimizer, naming.groups) if optimizer is not None else {}
    return {"model": model, "optimizer": state}


@torch.no_grad()
def _copied(value: Any) -> Any:
    """A copy of a tensor on the host, which later steps do not change; other values as they are."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _write(state: dict[str, Any], writer: _StagedWriter, ranks: Control) -> CheckpointError | None:
    """Write the state of all ranks, and commit the checkpoint; collective.

    Returns:
        The error, on all ranks, if a rank could not write; else None.

    Raises:
        LostPeerError: a rank did not take part.
    """
    alone = ranks.ranks == 1
    try:
        with ranks.as_lost_peer("the other ranks"), without_single_process_warning():
            save(
                state,
                storage_writer=writer,
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=None if alone else ranks.group,
                no_dist=alone,
            )
    except CheckpointException as error:
        if ranks.rank == 0:
            shutil.rmtree(writer.path, ignore_errors=True)
        problems = {rank: describe(failure) for rank, (failure, _) in error.failures.items()}
        problem = CheckpointError(f"cannot write to {writer.path}: {joined(problems, ranks.ranks)}")
        problem.__cause__ = error
        return problem
    return None


class _StagedWriter(FileSystemWriter):
    """Writes the files of one save, with their digests, and commits them.

    Args:
        path: the path of the checkpoint.
        number: the number of the save; unique, and equal on all ranks.
    """

    def __init__(self, path: Path, number: str) -> None:
        self._home, self._folder = path, path / f"save-{number}"
        super().__init__(self._folder)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files, and record paths relative to the checkpoint's folder, and digests."""
        written = super().write_data(plan, planner)
        for result in written.wait():
            info = result.storage_data
            with (self._folder / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                digest = hashlib.sha256(file.read(info.length)).hexdigest()
            name = f"{self._folder.name}/{info.relative_path}"
            vars(info).update(relative_path=name, sha256=digest)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the files of all ranks, and remove the old checkpoint."""
        files = {result.storage_data.relative_path for part in results for result in part}
        if absent := sorted(file for file in files if not (self._home / file).is_file()):
            raise CheckpointError(
                f"other ranks have written {', '.join(absent)}, which this rank cannot see: all "
                "ranks must share the folder"
            )
        super().finish(metadata, results)
        written = self._folder / METADATA
        content = written.read_bytes()
        with written.open("ab") as file:
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)
        written.replace(self._home / METADATA)
        with contextlib.suppress(OSError):  # the save is committed; removing the old one may fail
            for folder in (self._home, self._home.absolute().parent):
                sync_folder(folder)
            for old in {*self._home.glob(SAVED)} - {self._folder}:
                if all(_is_ours(file) for file in old.glob("*")):
                    shutil.rmtree(old, ignore_errors=True)
            for old in self._home.glob("__*_*.distcp"):  # of a save by torch itself
                old.unlink()


def _is_ours(file: Path) -> bool:
    """Whether ``save_checkpoint`` wrote this file. Its ``.metadata`` files list data files with
    their folder; those of other writers list names only.
    """
    if file.name == METADATA:
        return f"{file.parent.name}/__".encode() in file.read_bytes()
    return any(map(file.match, ("__*_*.distcp", f"{METADATA}.tmp")))


@contextlib.contextmanager
def without_single_process_warning() -> Iterator[None]:
    """Context without torch's warning that torch.distributed is disabled. torch issues this warning
    even if the caller passes ``no_dist=True``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
