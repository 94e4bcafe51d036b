"""Collective work of a trainer's ranks between two steps: it succeeds on all ranks or none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from autosplit.errors import CheckpointError
from autosplit.pipeline.engine.control import Control

if TYPE_CHECKING:
    from autosplit.pipeline.trainer import PipelineTrainer

T = TypeVar("T")


class Ranks:
    """The ranks of a trainer, busy with a checkpoint. Every rank makes the same calls.

    Args:
        trainer: between two steps.
        doing: what they are busy with, for errors.

    Raises:
        CheckpointError: this is no trainer.

    Attributes:
        number: this rank, of all.
        count: how many there are, of all replicas of the pipeline.
        pipelines: for each replica its ranks.
        place: of its pipeline in the mesh.
    """

    def __init__(self, trainer: PipelineTrainer, doing: str) -> None:
        if not hasattr(trainer, "together"):
            raise CheckpointError(
                f"{doing} takes a PipelineTrainer, got a {type(trainer).__name__}: a model in one "
                "process takes up a checkpoint by "
                "model.load_state_dict(autosplit.checkpoint.read_checkpoint(path)), and "
                "torch.save(model.state_dict(), path) writes what load_checkpoint reads"
            )
        self.trainer = trainer
        self._doing = doing
        self._beside: Control | None = None
        with trainer.together(doing) as groups:
            self.number = groups.everybody.rank
            self.count = groups.everybody.ranks
            self.pipelines = groups.layout.pipelines
            self.place = groups.layout.place

    def beside(self, control: Control) -> Ranks:
        """The same ranks for another thread, which talk over a group of their own: the trainer goes
        on meanwhile, and does not end if that fails.
        """
        found = copy.copy(self)
        found._beside = control
        return found

    @contextmanager
    def together(self) -> Iterator[Control]:
        """All ranks, for something after which a trainer cannot go on if it fails."""
        if self._beside is not None:
            yield self._beside
            return
        with self.trainer.together(self._doing) as groups:
            yield groups.everybody

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank.

        Raises:
            PipelineError: a rank did not take part.
        """
        with self.together() as everybody:
            return everybody.gather(value)

    def do(self, work: Callable[[], T]) -> T:
        """What ``work()`` returns on this rank, if it works on all of them.

        Raises:
            CheckpointError: on every rank, if it raised on one; it says on which, and what.
        """
        found: list[T] = []
        problem, cause = None, None
        try:
            found.append(work())
        except Exception as error:
            problem, cause = _said(error), error
        self.check(problem, cause)
        return found[0]

    def check(self, problem: str | None, cause: BaseException | None = None) -> None:
        """Raise what any rank has found.

        Args:
            problem: what this rank has found; None: nothing.
            cause: what led to it.

        Raises:
            CheckpointError: on every rank, if one has found a problem.
        """
        problems = self.gather(problem)
        if any(each is not None for each in problems):
            raise CheckpointError(_told(problems)) from cause


def _said(error: Exception) -> str:
    """Our own errors say all there is to say."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _told(problems: list[str | None]) -> str:
    """Each problem with the rank that has it; one that all have, once."""
    if len({*problems}) == 1:
        return str(problems[0])
    found = enumerate(problems)
    return "\n".join(f"rank {rank}: {each}" for rank, each in found if each is not None)
