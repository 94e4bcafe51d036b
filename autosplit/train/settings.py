"""What ``autosplit train`` is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autosplit.errors import PipelineError

MICROBATCHES_PER_RANK = 2


@dataclass(frozen=True)
class TrainSettings:
    """One run; every rank has the same.

    Attributes:
        model: a folder of transformers, its ``config.json``, or ``MODULE:FUNCTION``.
        data: a file of UTF-8 text.
        ranks: processes, one stage each.
        overrides: keyword settings of the function.
        steps: at which step to end; None: behind one pass through the text.
        batch: windows of text in a step; None: one a microbatch.
        microbatches: M; None: ``MICROBATCHES_PER_RANK`` for each rank.
        length: tokens in a window.
        schedule: see ``autosplit.partition``.
        learning_rate: of AdamW.
        memory_limit: see ``autosplit.partition``.
        seed: of what the model draws; each rank adds its number.
        estimate: cut by FLOPs and bytes rather than by measured times.
        checkpoint: the folder of the run's checkpoint; None: none is written.
        every: steps between two checkpoints; None: one, at the end.
        resume: go on from the checkpoint, if there is one.
        history: a file of JSON lines, one a step; None: none is written.

    Raises:
        PipelineError: values that cannot be, or do not go together.
    """

    model: str
    data: Path
    ranks: int
    overrides: Mapping[str, str] = field(default_factory=dict)
    steps: int | None = None
    batch: int | None = None
    microbatches: int | None = None
    length: int = 128
    schedule: str = "1f1b"
    learning_rate: float = 1e-3
    memory_limit: str | None = None
    seed: int = 0
    estimate: bool = False
    checkpoint: Path | None = None
    every: int | None = None
    resume: bool = False
    history: Path | None = None

    def __post_init__(self) -> None:
        if self.samples % self.parts:
            raise PipelineError(
                f"a batch of {self.samples} windows cannot be cut into {self.parts} equal "
                f"microbatches: --batch {self.parts * max(1, self.samples // self.parts)}, or "
                "another number of --microbatches"
            )
        if not self.learning_rate > 0:
            raise PipelineError(f"--lr is a positive number; got {self.learning_rate}")
        for name, value in (("--every", self.every), ("--resume", self.resume)):
            if value and self.checkpoint is None:
                raise PipelineError(f"{name} has no effect without --checkpoint FOLDER")

    @property
    def parts(self) -> int:
        """M."""
        return self.microbatches or MICROBATCHES_PER_RANK * self.ranks

    @property
    def samples(self) -> int:
        """Windows of text in a step."""
        return self.batch or self.parts
