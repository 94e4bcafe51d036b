"""Records one rank's memory in a step of a trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.mode import Mode
from autosplit.pipeline.engine.timing import Recorder
from autosplit.pipeline.ledger.bands import Band, BytesByOwner, MemoryRecorder, state_of
from autosplit.pipeline.training.state.rank_state import RankState
from autosplit.stage import Stage

from .rank_prediction import RankPrediction

MEMORY = "memory"

Record: TypeAlias = "bool | Literal['memory']"
"""What a trainer records of a step: nothing, when what ran, or with that what ranks held."""


def check_record(record: object) -> None:
    """Refuse what is no ``Record``.

    Raises:
        PipelineError: lists what is.
    """
    if not isinstance(record, bool) and record != MEMORY:
        raise PipelineError(
            f"record is False, True (for timeline()) or {MEMORY!r} (for memory() too); "
            f"got {record!r}"
        )


class RankLedger:
    """Records one step.

    Args:
        mode: what is run.
        held: the rank's share of the model.
        optimizer: the tensors of the optimizer's state.
        batch: those of the batch, None for what the rank does not take.
        times: records when what ran.
        device: where the stages run.
        prediction: of the same step.

    Attributes:
        recorder: for the executor.
        prediction: of the same step.
    """

    def __init__(
        self,
        mode: Mode,
        held: RankState,
        optimizer: Sequence[Tensor],
        batch: Sequence[Tensor | None],
        times: Recorder,
        device: torch.device,
        prediction: RankPrediction,
    ) -> None:
        self.prediction = prediction
        self._moves = mode.moves
        stages = [each for each in mode.stages.values() if isinstance(each, Stage)]
        holdings = BytesByOwner(
            {
                "parameters": lambda: state_of(held.modules.values()),
                "gradients": lambda: [
                    *(parameter.grad for parameter in held.parameters),
                    *(sum_ for stage in stages for sum_ in stage.gradients.values()),
                ],
                "optimizer state": lambda: optimizer,
                "batch": lambda: batch,
                "saved": lambda: [each for stage in stages for each in stage.saved_tensors],
                "deferred": lambda: [each for stage in stages for each in stage.deferred_tensors],
                "evicted here": lambda: [] if mode.moves is None else mode.moves.guests,
                "in transit": lambda: [
                    *mode.messages.tensors,
                    *([] if mode.moves is None else mode.moves.moving),
                ],
            },
            constant=("parameters", "optimizer state", "batch"),
        )
        beside = None if mode.moves is None else mode.moves.transferred.most
        self.recorder = MemoryRecorder(times, holdings, device, beside=beside)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around the step, and whatever may be run again of it."""
        moves = contextlib.nullcontext() if self._moves is None else self._moves.counted()
        with self.recorder.recording(), moves:
            yield

    def finish(self, losses: Iterable[Tensor]) -> None:
        """The step ran to its end and gave these."""
        self.recorder.finish(losses)

    def bands(self) -> list[Band]:
        """What was recorded, once the device has done what it was given."""
        return self.recorder.bands()

    def measured(self) -> dict[str, int]:
        """By action, the most that was held beside fixed owners and the batch: while it ran, or
        since the end of the one before it. Where there are moves, what there was at that end counts
        for that one alone, as it may have left since then.
        """
        found: dict[str, int] = {}
        between = last = 0
        for band in self.bands():
            level = band.activations - self.prediction.batch_bytes
            if band.during:
                found[band.during] = max(found.get(band.during, 0), level, between)
                between, last = 0, 0 if self._moves is None else level
            elif level > last:
                between = max(between, level)
        return found
