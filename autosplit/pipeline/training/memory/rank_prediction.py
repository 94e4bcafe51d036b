"""What one rank of a trainer will hold in a step beside its fixed owners, before it runs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from autosplit.pipeline.engine.mode import Mode
from autosplit.pipeline.engine.stages import all_traced
from autosplit.pipeline.ledger.call_memory import CallMemory
from autosplit.pipeline.ledger.prediction import Evicted, RankReplay
from autosplit.pipeline.schedule.schedule import without_sharding
from autosplit.torch_internals.state import distinct_storage_bytes


class RankPrediction:
    """Predicts a rank's peak.

    Args:
        mode: what is run; its stages are built. It is predicted for the schedule that it has now.
        batch: the tensors of the batch, None for what the rank does not take.
        calls: knows what stages' calls hold.

    Attributes:
        batch_bytes: of the batch.
    """

    def __init__(self, mode: Mode, batch: Iterable[Tensor | None], calls: CallMemory) -> None:
        self._mode = mode
        self._schedule, self._moves = mode.schedule, mode.moves
        self._calls = calls
        self.batch_bytes = distinct_storage_bytes(batch)

    def evicted(self) -> Evicted:
        """What this rank sends its partner."""
        replay = self._replay()
        if replay is None or self._moves is None:
            return {}
        replay.peak({})
        return replay.evicted

    def peak(self, guests: Evicted) -> int | None:
        """The most bytes beside fixed owners; None where nothing is known of a stage.

        Args:
            guests: what every rank evicts.
        """
        replay = self._replay()
        return None if replay is None else replay.peak(guests) + self.batch_bytes

    def _replay(self) -> RankReplay | None:
        mode = self._mode
        stages = all_traced(mode.stages)
        if stages is None:
            return None
        boundaries = mode.negotiation.learn
        return RankReplay(
            without_sharding(self._schedule), mode.rank, mode.feeds, stages, boundaries, self._calls
        )
