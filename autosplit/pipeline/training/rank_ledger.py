"""Records one rank's memory in a step of a trainer, and predicts it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.execution.mode import Mode
from autosplit.pipeline.engine.execution.recorder import Recorder
from autosplit.pipeline.ledger.bands import Band
from autosplit.pipeline.ledger.call_memory import CallMemory
from autosplit.pipeline.ledger.holdings import Holdings, state_of
from autosplit.pipeline.ledger.prediction import Evicted, RankReplay
from autosplit.pipeline.ledger.recorder import MemoryRecorder
from autosplit.stage import Stage
from autosplit.torch_internals.storage import distinct_storage_bytes

from .rank_state import RankState

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
        calls: knows what stages' calls hold.

    Attributes:
        recorder: for the executor.
        batch_bytes: of the batch.
    """

    def __init__(
        self,
        mode: Mode,
        held: RankState,
        optimizer: Sequence[Tensor],
        batch: Sequence[Tensor | None],
        times: Recorder,
        device: torch.device,
        calls: CallMemory,
    ) -> None:
        self._mode = mode
        self._calls = calls
        self._stages = {i: each for i, each in mode.stages.items() if isinstance(each, Stage)}
        self._batch = batch
        self.batch_bytes = distinct_storage_bytes(batch)
        stages = self._stages.values()
        holdings = Holdings(
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
        self.recorder = MemoryRecorder(times, holdings, device, alone=mode.moves is None)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around the step, and whatever may be run again of it."""
        with self.recorder.recording():
            yield

    def finish(self, losses: Iterable[Tensor]) -> None:
        """The step ran to its end and gave these."""
        self.recorder.finish(losses)

    def bands(self) -> list[Band]:
        """What was recorded, once the device has done what it was given."""
        return self.recorder.bands()

    def evicted(self) -> Evicted:
        """What this rank sends its partner, as predicted."""
        replay = self._replay()
        if replay is None or self._mode.moves is None:
            return {}
        replay.peak({})
        return replay.evicted

    def predicted(self, guests: Evicted) -> int | None:
        """The peak beside fixed owners; None where nothing is known of a stage.

        Args:
            guests: what every rank evicts.
        """
        replay = self._replay()
        if replay is None:
            return None
        return replay.peak(guests) + self.batch_bytes

    def measured(self) -> dict[str, int]:
        """By action, the most that was held beside fixed owners and the batch since the end of the
        one before it.
        """
        found: dict[str, int] = {}
        before = 0
        for band in self.bands():
            level = band.activations - self.batch_bytes
            if not band.during:
                before = max(before, level)
                continue
            found[band.during] = max(found.get(band.during, 0), level, before)
            before = 0
        return found

    def _replay(self) -> RankReplay | None:
        if len(self._stages) < len(self._mode.stages):
            return None
        mode = self._mode
        return RankReplay(
            mode.schedule, mode.rank, mode.feeds, self._stages, mode.negotiation.learn, self._calls
        )
