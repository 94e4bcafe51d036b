"""What one rank tells of itself to a search within a limit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from autosplit.errors import PipelineError
from autosplit.mesh.costs import Link
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.host_store import HostFileStore, HostStore
from autosplit.pipeline.engine.shapes import TensorMeta
from autosplit.pipeline.engine.stages import (
    TrainableStage,
    all_traced,
    stage_memory,
)
from autosplit.pipeline.engine.timing import measure_slowing, measure_store
from autosplit.pipeline.engine.transfers import MoveTimes
from autosplit.pipeline.ledger.bands import state_of
from autosplit.pipeline.ledger.call_memory import CallMemory
from autosplit.pipeline.ledger.prediction import RankReplay
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.transfer import MoveCosts
from autosplit.pipeline.training.optimizer_step import OptimizerStep
from autosplit.pipeline.training.state.rank_state import RankState
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.state import distinct_storage_bytes, state_bytes

from .rank_ledger import RankLedger


class RankSize:
    """Bytes of a rank, fixed and by action, and how fast its store is.

    Args:
        held: what the rank holds.
        groups: the trainer's process groups.
        update: the optimizer's steps.
        feeds: who feeds whom.
        calls: knows what stages' calls hold.
        store: where the rank offloads, if it does.

    Attributes:
        stages: the rank's stages; empty before its first batch.
        boundaries: gives what a stage puts out.
        batch_bytes: those of the batch.
        ledger: of the last step, where that was measured.
        times: how long moves kept this rank's thread in the last steps, where they have any.
    """

    def __init__(
        self,
        held: RankState,
        groups: Groups,
        update: OptimizerStep,
        feeds: Feeds,
        calls: CallMemory,
        store: HostStore | None,
    ) -> None:
        self._held, self._groups, self._update = held, groups, update
        self._feeds, self._calls, self._store = feeds, calls, store
        self.stages: Mapping[int, TrainableStage] = {}
        self.boundaries: Callable[[int], Sequence[TensorMeta]] = lambda stage: ()
        self.batch_bytes = 0
        self.ledger: RankLedger | None = None
        self.times: MoveTimes | None = None
        self.send_seconds = 0.0
        self._slowing: float | None = None

    def fixed_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer state and batch."""
        state = distinct_storage_bytes(state_of(self._held.modules.values()))
        trained = [p for p in self._held.parameters if p.requires_grad]
        gradients = sum(local_tensor(p).nbytes for p in trained)
        return state + gradients + state_bytes(self._update.optimizer) + self.batch_bytes

    def replay(self, schedule: Schedule) -> RankReplay | None:
        """Plays this rank's part of a schedule; None where a stage's graphs are not known."""
        stages = all_traced(self.stages)
        if stages is None:
            return None
        rank = self._groups.rank
        return RankReplay(schedule, rank, self._feeds, stages, self.boundaries, self._calls)

    def measured(self) -> Mapping[str, int]:
        """What the last step held by action; empty where that was not measured."""
        return {} if self.ledger is None else self.ledger.measured()

    def host_link(self) -> Link:
        """The slowest rank's link to its store; collective.

        Raises:
            PipelineError: no rank has a store.
        """
        links = self._groups.everybody.gather(
            None if self._store is None else measure_store(self._store, self._piece())
        )
        known = [each for each in links if each is not None]
        if not known:
            raise PipelineError("no rank has a store that could be measured: nothing is offloaded")
        return Link(max(each.latency for each in known), min(each.bandwidth for each in known))

    def move_costs(self) -> MoveCosts:
        """What moves and messages take of ranks, as of the slowest one; collective. How much copies
        slow them down is measured once, on all at the same time.
        """
        if self._slowing is None:
            self._groups.everybody.gather(None)  # to begin together
            store, own = self._store, 0.0
            if isinstance(store, HostFileStore):
                own = measure_slowing(store, self._piece())
            self._slowing = statistics.median(self._groups.everybody.gather(own))
        noted = MoveCosts() if self.times is None else self.times.costs()
        heard = self._groups.everybody.gather((noted.leave, noted.come, self.send_seconds))
        leave, come, send = (max(each) for each in zip(*heard, strict=True))
        return MoveCosts(leave, come, self._slowing, send)

    def _piece(self) -> int:
        """Bytes of a storage that stages hold, on the average."""
        pieces = [each for stage in self.stages.values() for each in stage_memory(stage).pieces]
        return int(sum(pieces) / max(1, len(pieces)))
