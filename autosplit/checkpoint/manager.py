"""Manage the checkpoints of one run: each save has a folder; the last and the best are kept."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autosplit.errors import CheckpointError

from .loading import Loaded, load_checkpoint, read_planning, read_progress
from .naming import Names
from .ranks import Ranks
from .reading import METADATA, SAVED, Checkpoint, open_checkpoint
from .saving import PendingSave, save_checkpoint

if TYPE_CHECKING:
    from autosplit.trainer.trainer import PipelineTrainer

_FOLDER = re.compile(r"step-(\d{8}|[1-9]\d{8,})")  # as ``_path`` writes it
_SCORE = "score"


class CheckpointManager:
    """Saves a run's checkpoints, keeps the last and the best, and resumes from the last.

    ::

        manager = CheckpointManager("runs/mine", keep=3)
        planning = manager.planning(stages=4)         # None in a new run
        trainer = PipelineTrainer(model, ..., stage_options=StageOptions(planning=planning))
        step = manager.resume(trainer)                # 0 in a new run
        ...
        manager.save(trainer, step=step, score=validation_loss)

    Each save has a folder ``step-NUMBER`` in ``folder``, with a checkpoint of ``save_checkpoint``.
    A folder without a committed checkpoint, of a save that was killed, is ignored. After a save,
    rank 0 removes the folders that are not kept, unless they hold other files than a checkpoint's.

    Args:
        folder: the folder of the run; all ranks must see it.
        keep: the number of latest checkpoints to keep, at least 1.
        keep_best: the number of checkpoints with the best scores to keep in addition.
        best: ``"min"`` if the smallest score is the best, ``"max"`` if the largest is.
        names: as for ``save_checkpoint``.

    Raises:
        CheckpointError: ``keep``, ``keep_best`` or ``best`` is invalid.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        keep_best: int = 1,
        best: Literal["min", "max"] = "min",
        names: Names | None = None,
    ) -> None:
        if keep < 1 or keep_best < 0 or best not in ("min", "max"):
            raise CheckpointError(
                "a CheckpointManager needs keep >= 1, keep_best >= 0 and best='min' or 'max'; got "
                f"keep={keep!r}, keep_best={keep_best!r}, best={best!r}"
            )
        self._folder, self._names = Path(folder), names
        self._keep, self._keep_best, self._sign = keep, keep_best, 1 if best == "min" else -1
        self._open: Checkpoint | None = None  # between ``planning`` and the load

    @property
    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, in order."""
        paths = self._folder.glob(f"step-*/{METADATA}")
        matches = [_FOLDER.fullmatch(path.parent.name) for path in paths]
        return sorted(int(match[1]) for match in matches if match)

    @property
    def latest(self) -> Path | None:
        """The folder of the latest checkpoint; None if there is none."""
        steps = self.steps
        return self._path(steps[-1]) if steps else None

    @property
    def best(self) -> Path | None:
        """The folder of the checkpoint with the best score; None if none has a score."""
        best = self._best_first(self.steps)
        return self._path(best[0]) if best else None

    def save(
        self,
        trainer: PipelineTrainer,
        *,
        step: int,
        score: float | None = None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> PendingSave | None:
        """Save a checkpoint, and remove checkpoints that are no longer kept; call on all ranks.

        With ``asynchronous``, the next save removes the checkpoints that this save replaces.

        Args:
            trainer, step, scheduler, extra, asynchronous: as for ``save_checkpoint``.
            score: the score of the checkpoint, such as a validation loss; equal on all ranks.

        Raises:
            CheckpointError, PipelineError: as ``save_checkpoint``.
        """
        self._open = None
        content = dict(extra or {}) if score is None else {**(extra or {}), _SCORE: float(score)}
        pending = save_checkpoint(
            trainer,
            self._path(step),
            names=self._names,
            scheduler=scheduler,
            step=step,
            extra=content,
            asynchronous=asynchronous,
        )
        with trainer.together("saving a checkpoint") as groups:
            is_first = groups.everybody.rank == 0
        if is_first:
            self._remove_old()
        return pending

    def resume(self, trainer: PipelineTrainer, *, scheduler: Any = None) -> int:
        """Load the latest checkpoint, if there is one; call on all ranks.

        Returns:
            The step at which it was saved; 0 without a checkpoint.

        Raises:
            CheckpointError, PipelineError: as ``load_checkpoint``; or ranks see different
                checkpoints.
        """
        loaded = self.load(trainer, scheduler=scheduler)
        return 0 if loaded is None else loaded.step or 0

    def load(self, trainer: PipelineTrainer, *, scheduler: Any = None) -> Loaded | None:
        """Load the latest checkpoint as ``resume`` does, and return the result of
        ``load_checkpoint``; None without a checkpoint.
        """
        ranks = Ranks(trainer, "loading a checkpoint")
        latest = self.latest
        rows = ranks.gather(None if latest is None else latest.name)
        if len({*rows}) > 1:
            raise CheckpointError(
                f"the ranks see different latest checkpoints in {self._folder}: {rows}; all ranks "
                "must see the same folder"
            )
        if latest is None:
            return None
        opened, self._open = self._open, None
        source = opened if opened is not None and opened.path == latest else latest
        return load_checkpoint(trainer, source, names=self._names, scheduler=scheduler)

    def planning(self, stages: int | None = None) -> dict[str, Any] | None:
        """Read how the latest checkpoint's trainer cut its model, for
        ``StageOptions(planning=...)``. With these options, a restarted trainer measures nothing and
        cuts at the same places. None if there is no checkpoint, or its trainer cut no model.

        Args:
            stages: as for ``read_planning``.
        """
        latest = self.latest
        self._open = None if latest is None else open_checkpoint(latest)
        return None if self._open is None else read_planning(self._open, stages)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _best_first(self, steps: Sequence[int]) -> list[int]:
        """The steps among ``steps`` whose checkpoints have a score, the best first."""
        scores = {step: read_progress(self._path(step))[1].get(_SCORE) for step in steps}
        scored = [(self._sign * score, step) for step, score in scores.items() if score is not None]
        return [step for _, step in sorted(scored)]

    def _remove_old(self) -> None:
        steps = self.steps
        best = self._best_first(steps)[: self._keep_best] if self._keep_best else []
        for step in {*steps[: -self._keep]}.difference(best):
            path = self._path(step)
            if all(file.name == METADATA or file.match(SAVED) for file in path.iterdir()):
                with contextlib.suppress(OSError):  # a file that is still read elsewhere
                    shutil.rmtree(path)
