"""Collective work of a trainer's ranks between two steps, which succeeds on all ranks or on
none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from autosplit.errors import CheckpointError, with_code

if TYPE_CHECKING:
    from autosplit.trainer.trainer import PipelineTrainer

T = TypeVar("T")

_CALLS = {"saving a checkpoint": "save_checkpoint", "loading a checkpoint": "load_checkpoint"}


class Ranks:
    """The ranks of a trainer that save or load a checkpoint. Every rank makes the same calls.

    Args:
        trainer: the trainer, between two steps.
        doing: the work as text for errors, such as "saving a checkpoint".

    Raises:
        CheckpointError: ``trainer`` is not a PipelineTrainer.

    Attributes:
        number: the number of this rank among all ranks.
        count: the number of all ranks, over all replicas of the pipeline.
        place: the mesh coordinates of this rank's pipeline.
        layout: a list of each rank's digest of its stages and layers; the same list on every rank.
        cut: a digest of all stages and their layers, and of the shares of the batch; independent
            of the placement of stages.
    """

    def __init__(self, trainer: PipelineTrainer, doing: str) -> None:
        if not hasattr(trainer, "together"):
            raise CheckpointError(
                with_code(
                    f"{doing} takes a PipelineTrainer, got a {type(trainer).__name__}: a model in "
                    "one process loads a checkpoint by "
                    "model.load_state_dict(autosplit.checkpoint.read_checkpoint(path)), and "
                    "torch.save(model.state_dict(), path) writes a file that load_checkpoint reads",
                    wrong=f"{_CALLS[doing]}(model, path)",
                    right=f"{_CALLS[doing]}(trainer, path)  # the trainer of the model",
                )
            )
        self.trainer, self.doing = trainer, doing
        with trainer.together(doing) as groups:
            self.number, self.count = groups.everybody.rank, groups.everybody.ranks
            self.place = groups.layout.place
        trainer.finish()
        stages = [
            # Cuts beside layers without parameters change no names.
            [at, getattr(m, "cuts", ()), *dict(m.named_modules()), *dict(m.named_parameters())]
            for at, m in trainer.modules.items()
        ]
        rows = self.gather((_digest([groups.layout.pipelines, stages]), stages))
        self.layout = [layout for layout, _ in rows]
        by_index = {stage[0]: stage for _, stages in rows for stage in stages}
        self.cut = _digest([groups.layout.shares, sorted(by_index.items())])

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, in the order of the ranks. Collective.

        Raises:
            PipelineError: a rank did not take part.
        """
        with self.trainer.together(self.doing) as groups:
            return groups.everybody.gather(value)

    def do(self, work: Callable[[], T]) -> T:
        """Return the result of ``work()`` on this rank, if it succeeds on all ranks.

        Raises:
            CheckpointError: on every rank, if ``work`` raised on one; names that rank and its
                error.
        """
        results: list[T] = []
        problem: Exception | None = None
        try:
            results.append(work())
        except Exception as error:
            problem = error
        reports = self.gather(problem and describe(problem))
        if problems := {rank: report for rank, report in enumerate(reports) if report is not None}:
            raise CheckpointError(joined(problems, self.count)) from problem
        return results[0]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def describe(error: BaseException) -> str:
    """The text of an error, with the error's type unless it is a CheckpointError."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def joined(problems: Mapping[int, str], ranks: int) -> str:
    """The problems of all ranks as one text. A problem that all ranks have is listed once."""
    if len(problems) == ranks and len({*problems.values()}) == 1:
        return next(iter(problems.values()))
    return "\n".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
