"""Collective work of a trainer's ranks between two steps: it succeeds on all ranks or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from autosplit.errors import CheckpointError

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
        place: of its pipeline in the mesh.
        layout: digests of which stages and layers each rank has; the same on every rank.
    """

    def __init__(self, trainer: PipelineTrainer, doing: str) -> None:
        if not hasattr(trainer, "together"):
            raise CheckpointError(
                f"{doing} takes a PipelineTrainer, got a {type(trainer).__name__}: a model in one "
                "process takes up a checkpoint by "
                "model.load_state_dict(autosplit.checkpoint.read_checkpoint(path)), and "
                "torch.save(model.state_dict(), path) writes what load_checkpoint reads"
            )
        self.trainer, self.doing = trainer, doing
        with trainer.together(doing) as groups:
            self.number, self.count = groups.everybody.rank, groups.everybody.ranks
            self.place = groups.layout.place
        trainer.finish()
        held = [
            # Cuts beside layers without parameters change no names.
            [at, getattr(m, "cuts", ()), *dict(m.named_modules()), *dict(m.named_parameters())]
            for at, m in trainer.modules.items()
        ]
        said = repr([groups.layout.pipelines, held]).encode()
        self.layout = self.gather(hashlib.sha256(said).hexdigest())

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank.

        Raises:
            PipelineError: a rank did not take part.
        """
        with self.trainer.together(self.doing) as groups:
            return groups.everybody.gather(value)

    def do(self, work: Callable[[], T]) -> T:
        """What ``work()`` returns on this rank, if it works on all of them.

        Raises:
            CheckpointError: on every rank, if it raised on one; it says on which, and what.
        """
        found: list[T] = []
        problem: Exception | None = None
        try:
            found.append(work())
        except Exception as error:
            problem = error
        said = self.gather(problem and told(problem))
        if problems := {rank: each for rank, each in enumerate(said) if each is not None}:
            raise CheckpointError(joined(problems, self.count)) from problem
        return found[0]


def told(error: BaseException) -> str:
    """Our own errors say all there is to say."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def joined(problems: Mapping[int, str], ranks: int) -> str:
    """Problems by the rank that has them; one that all have, once."""
    if len(problems) == ranks and len({*problems.values()}) == 1:
        return next(iter(problems.values()))
    return "\n".join(f"rank {rank}: {each}" for rank, each in problems.items())
