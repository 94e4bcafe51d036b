"""Saves a trainer under the names of the whole model, so that any other cut of it can load it.

A save has its files in a folder of its own, ``save-NUMBER``, in which they get their place and are
never renamed. What names them is the checkpoint's ``.metadata``, and renaming that one file takes
back the old checkpoint and gives the new one. So whoever reads, whenever a save was killed, finds
the old checkpoint, if there was one, or the new one; the next save removes what was left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autosplit.errors import CheckpointError
from autosplit.torch_internals.dtensor import is_dtensor

from . import optimizer_state, run_state
from .folder import METADATA, SAVE, digest, manifest_text, parts_in_use
from .naming import Names, Naming, tensors_of, trained
from .ranks import Ranks

if TYPE_CHECKING:
    from autosplit.pipeline.trainer import PipelineTrainer


class PendingSave:
    """A save under way: what is saved was copied, and a thread writes it.

    Args:
        work: writes it.
        where: it is written to, for errors.
    """

    def __init__(self, work: Callable[[], None], where: object) -> None:
        self._work = work
        self._where = where
        self._error: BaseException | None = None
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
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"the save to {self._where} was cut off: {error}") from error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error


@torch.no_grad()
def copied(value: Any) -> Any:
    """The same with all tensors copied to the host, which no later step changes."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: copied(each) for name, each in value.items()}
    return value


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
    a manifest of SHA-256 digests. Each rank writes its own stages; tied parameters are there under
    each of their names, as in the model's ``state_dict``.

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
            name for different parameters, or something to be saved has no place here.
        PipelineError: a rank was lost.
    """
    ranks = Ranks(trainer, "saving a checkpoint")
    trainer.finish()
    path = Path(path)
    naming = Naming.of_ranks(ranks, names)
    state = ranks.do(
        lambda: _state(ranks, naming, scheduler=scheduler, step=step, extra=extra or {})
    )
    staging = _staging(ranks, path, step)
    if not asynchronous:
        _write(state, staging, ranks)
        return None
    state = ranks.do(lambda: copied(state))
    with trainer.together("saving a checkpoint") as groups:
        apart = ranks.beside(groups.beside())
    pending = PendingSave(lambda: _write(state, staging, apart), path)
    trainer.finish(pending.wait)
    return pending


def _write(state: Mapping[str, Any], staging: Staging, ranks: Ranks) -> None:
    """Write what the ranks have, and make it the checkpoint; collective."""
    from .writer import write_tensors

    try:
        with ranks.together() as everybody:
            problem = write_tensors(state, staging.folder, everybody)
        ranks.check(problem)
        own = ranks.do(lambda: _digests(staging.folder, ranks.number))
        digests = {name: value for part in ranks.gather(own) for name, value in part.items()}
        ranks.do(lambda: staging.commit(digests) if ranks.number == 0 else None)
    except CheckpointError:
        if ranks.number == 0:
            staging.abandon()
        raise


def _state(
    ranks: Ranks, naming: Naming, *, scheduler: Any, step: int | None, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """What this rank writes."""
    trainer = ranks.trainer
    # Not every holder of a tied parameter writes it, only its home, under all its names; of two
    # copies of a stage the first, and of replicas the first.
    placement = trainer.schedule.placement
    writes = ranks.place.replicate == 0
    first = [stage for stage, at in enumerate(placement) if at == trainer.rank and writes]
    homes = {
        at: entry for at, entry in naming.own.items() if at[0] == entry.home and at[0] in first
    }
    tensors = tensors_of(trainer, homes)
    state: dict[str, Any] = {
        "autosplit": run_state.pack_run(
            ranks, trained(trainer, naming), scheduler=scheduler, step=step, extra=extra
        )
    }
    # Of a tensor that ranks share each writes its part; of what each has the first.
    alone = not any(ranks.place)
    model = {name: tensors[at] for at, entry in homes.items() for name in entry.names}
    if found := {name: each for name, each in model.items() if alone or is_dtensor(each)}:
        state["model"] = found
    if trainer.optimizer is not None:
        called = {id(tensors[at]): entry.name for at, entry in homes.items()}
        flat = optimizer_state.flatten(trainer.optimizer, called)
        if kept := {name: each for name, each in flat.items() if alone or is_dtensor(each)}:
            state["optimizer"] = kept
    return state


def _staging(ranks: Ranks, path: Path, step: int | None) -> Staging:
    """Where all ranks write what they have of one step; rank 0 has made it."""
    said = ranks.gather((str(path), step, secrets.token_hex(8)))
    paths, steps, numbers = zip(*said, strict=True)
    if len({*paths}) > 1:
        raise CheckpointError(f"the ranks save to different folders: {', '.join(paths)}")
    if len({*steps}) > 1:
        raise CheckpointError(f"the ranks are at different steps: {[*steps]}")
    staging = Staging(path, numbers[0])
    ranks.do(lambda: staging.prepare() if ranks.number == 0 else None)
    return staging


def _digests(folder: Path, rank: int) -> dict[str, str]:
    """Of the files that this rank has written."""
    return {path.name: digest(path) for path in sorted(folder.glob(f"__{rank}_*"))}


class Staging:
    """Where one save has its files until they are the checkpoint; rank 0 makes and ends it.

    Args:
        path: of the checkpoint.
        number: of the save, the same on all ranks, which no other save has.

    Attributes:
        folder: where the ranks write.
    """

    def __init__(self, path: Path, number: str) -> None:
        self._path = path
        self.folder = path / f"{SAVE}{number}"
        self._committed = False

    def prepare(self) -> None:
        """Remove what killed saves have left, and make the folder.

        Raises:
            CheckpointError: something else than a folder is at the path.
        """
        if self._path.exists() and not self._path.is_dir():
            raise CheckpointError(f"{self._path} is a file: give the path of a folder to save to")
        # If that cannot be read, nobody knows what it needs; it is replaced all the same.
        with contextlib.suppress(CheckpointError, OSError):
            there = (self._path / METADATA).exists()
            _clear(self._path, parts_in_use(self._path) if there else set())
        self.folder.mkdir(parents=True)

    def commit(self, digests: Mapping[str, str]) -> None:
        """Make what was written the checkpoint, and remove the one before.

        Args:
            digests: of the files that all ranks have written, by name in the folder.

        Raises:
            CheckpointError: this rank does not see them.
        """
        name = self.folder.name
        absent = [file for file in digests if not (self.folder / file).is_file()]
        if absent:
            raise CheckpointError(
                f"other ranks have written {', '.join(absent)} to {self.folder}, which are not "
                "there: all ranks must see the same folder"
            )
        found = {f"{name}/{file}": value for file, value in digests.items()}
        found[METADATA] = digest(self.folder / METADATA)
        with (self.folder / "manifest.json").open("w") as file:
            file.write(manifest_text(found))
            file.flush()
            os.fsync(file.fileno())
        _sync(self.folder)
        (self.folder / METADATA).replace(self._path / METADATA)
        self._committed = True
        for folder in (self._path, self._path.absolute().parent):
            _sync(folder)
        _clear(self._path, {name})

    def abandon(self) -> None:
        """Remove what was written, after a save that failed before it was the checkpoint."""
        if not self._committed:
            shutil.rmtree(self.folder, ignore_errors=True)


def _clear(path: Path, used: set[str]) -> None:
    """Remove the files of saves but those in use, and of torch's own saves likewise."""
    for found in [*path.glob(f"{SAVE}*"), *path.glob("__*_*.distcp"), *path.glob(".metadata.tmp")]:
        if found.name in used:
            continue
        if found.is_dir():
            shutil.rmtree(found, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                found.unlink()


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk."""
    if os.name != "posix":
        return  # where a folder cannot be opened
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
