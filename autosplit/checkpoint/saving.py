"""Saves a trainer under the names of the whole model, so that any other cut of it can load it.

A save has its files in a folder of its own, ``save-NUMBER``, in which they get their place and are
never renamed. What names them is the checkpoint's ``.metadata``, and renaming that one file takes
back the old checkpoint and gives the new one. So whoever reads, whenever a save was killed, finds
the old checkpoint, if there was one, or the new one; the next save that succeeds removes what was
left.
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
from autosplit.pipeline.engine.control import Control

from . import run_state
from .naming import Names, Naming
from .ranks import Ranks, joined, told
from .reading import METADATA, SAVED

if TYPE_CHECKING:
    from autosplit.pipeline.trainer import PipelineTrainer


class PendingSave:
    """A save under way: what is saved was copied, and a thread writes it.

    Args:
        work: writes it, and gives what went wrong.
    """

    def __init__(self, work: Callable[[], CheckpointError | None]) -> None:
        self._work = work
        self._error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, name="autosplit-save", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended on this rank, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is there.

        Raises:
            CheckpointError: it is not, and what was at its path is as before. Raised once.
        """
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            self._error = self._work()
        except BaseException as error:
            self._error = CheckpointError(f"the save was cut off: {error}")
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
    """Save parameters, persistent buffers, optimizer, random generators, and what else is given;
    call on all ranks.

    The folder is one of torch.distributed.checkpoint, as for the model that is not cut:
    ``{"model": ..., "optimizer": ...}``, the latter flattened, and "autosplit" for the rest, with
    SHA-256 digests in its metadata. Each rank writes its own stages; tied parameters are there
    under each of their names, as in the model's ``state_dict``.

    What was at ``path`` stays until all ranks have written and everything is on disk; then it is
    replaced in one step. If anything fails before, or the processes are killed, the old checkpoint
    is there as it was, and what is left of the failed save goes with the next one. A rank waits
    for the others for as long as the trainer's ``timeout``. A save that fails on a rank that lives
    on does not end the trainer.

    With ``asynchronous``, the ranks copy what is to be saved to the host and go on, while a thread
    of each writes it, over a process group of its own: what they train meanwhile is not in it. One
    save goes on at a time; the next one, a load and ``close()`` wait for it, and raise what was
    wrong with it if nobody has waited.

    Args:
        trainer: between two steps.
        path: a folder that all ranks see.
        names: the whole model's name for what a stage calls ``name``: ``names(stage, name)``;
            needed for stages that were not cut from one model.
        scheduler: this rank's learning-rate scheduler over ``trainer.optimizer``, or anything with
            a ``state_dict`` like one; None on ranks that have no optimizer.
        step: how far the run is, as ``load_checkpoint`` is to say it; the same on all ranks.
        extra: tensors and plain values (numbers, strings, lists, dictionaries) that belong to the
            run, such as a data loader's state; those of rank 0 are saved.
        asynchronous: return while the files are written.

    Returns:
        With ``asynchronous`` the save, to ``wait()`` for; else None.

    Raises:
        CheckpointError: on every rank: a rank cannot write (it says which), two stages use one
            name for different parameters, gradients wait for a step, or something to be saved has
            no place here.
        PipelineError: a rank was lost.
    """
    ranks = Ranks(trainer, "saving a checkpoint")
    naming = Naming.of_ranks(ranks, names)

    def state() -> dict[str, Any]:
        if any(trainer.gradients().values()):
            raise CheckpointError(
                "forward_backward has added gradients that no step has taken, and a checkpoint has "
                "none: save behind step(), or put None into every .grad"
            )
        run = run_state.pack_run(ranks, naming.groups, scheduler=scheduler, step=step, extra=extra)
        found = {"autosplit": run, **_state(ranks, naming)}
        return _copied(found) if asynchronous else found

    content = ranks.do(state)
    said = ranks.gather((str(path), step, secrets.token_hex(8)))
    paths, steps, numbers = zip(*said, strict=True)
    for differ, values in (("save to different folders", paths), ("are at different steps", steps)):
        if len({*values}) > 1:
            raise CheckpointError(f"the ranks {differ}: {[*values]}")
    writer = _StagedWriter(Path(path), numbers[0])
    with trainer.together(ranks.doing) as groups:
        if not asynchronous:
            error = _write(content, writer, groups.everybody)
        else:
            apart = groups.beside()
    if asynchronous:
        pending = PendingSave(lambda: _write(content, writer, apart))
        trainer.finish(pending.wait)
        return pending
    if error is not None:
        raise error
    return None


def _state(ranks: Ranks, naming: Naming) -> dict[str, Any]:
    """What this rank writes of the model and the optimizer. Of what several ranks have, torch's
    planner takes that of the first; other replicas have nothing else.
    """
    if ranks.place.replicate:
        return {}
    optimizer = ranks.trainer.optimizer
    model = {name: tensor for tensor, entry in naming.own for name in entry.names}
    state = run_state.flatten_optimizer(optimizer, naming.groups) if optimizer is not None else {}
    return {"model": model, "optimizer": state}


@torch.no_grad()
def _copied(value: Any) -> Any:
    """The same with all tensors copied to the host, which no later step changes."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    return value


def _write(state: dict[str, Any], writer: _StagedWriter, ranks: Control) -> CheckpointError | None:
    """Write what the ranks have, and make it the checkpoint; collective.

    Returns:
        What went wrong, on all ranks.

    Raises:
        LostPeerError: some rank did not take part.
    """
    alone = ranks.ranks == 1
    try:
        with ranks.losing("the other ranks"), unworried():
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
        problems = {rank: told(each) for rank, (each, _) in error.failures.items()}
        found = CheckpointError(f"cannot write to {writer.path}: {joined(problems, ranks.ranks)}")
        found.__cause__ = error
        return found
    return None


class _StagedWriter(FileSystemWriter):
    """Writes the files of one save, with their digests, and makes them the checkpoint.

    Args:
        path: of the checkpoint.
        number: of the save, the same on all ranks, which no other save has.
    """

    def __init__(self, path: Path, number: str) -> None:
        self._home, self._folder = path, path / f"save-{number}"
        super().__init__(self._folder)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Name the files from the folder above theirs, where the metadata will be."""
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
        """Make what all ranks have written the checkpoint, and remove the one before."""
        files = {each.storage_data.relative_path for part in results for each in part}
        if absent := sorted(file for file in files if not (self._home / file).is_file()):
            raise CheckpointError(
                f"other ranks have written {', '.join(absent)}, which are not there: all ranks "
                "must see the same folder"
            )
        super().finish(metadata, results)
        written = self._folder / METADATA
        content = written.read_bytes()
        with written.open("ab") as file:
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        _sync(self._folder)
        written.replace(self._home / METADATA)
        with contextlib.suppress(OSError):  # it is there; the one before stays where names are not
            for folder in (self._home, self._home.absolute().parent):
                _sync(folder)
            for old in {*self._home.glob(SAVED)} - {self._folder}:
                if all(_is_ours(file) for file in old.glob("*")):
                    shutil.rmtree(old, ignore_errors=True)
            for old in self._home.glob("__*_*.distcp"):  # of a save by torch itself
                old.unlink()


def _is_ours(file: Path) -> bool:
    """Whether a save has written it; metadata of ours has files' names from the folder above."""
    if file.name == METADATA:
        return f"{file.parent.name}/__".encode() in file.read_bytes()
    return any(map(file.match, ("__*_*.distcp", f"{METADATA}.tmp")))


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk."""
    if os.name != "posix":
        return  # where a folder cannot be opened
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def unworried() -> Iterator[None]:
    """Without torch's warning that there is one process, which it gives even if told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
