"""What one rank of a trainer holds in a step: predicted, recorded, and told to a search."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.mesh.costs import Link
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.host_store import HostFileStore, HostStore
from autosplit.pipeline.engine.mode import Mode
from autosplit.pipeline.engine.stages import all_traced, stage_memory
from autosplit.pipeline.engine.timing import Recorder, measure_slowing, measure_store
from autosplit.pipeline.ledger.bands import BytesByOwner, MemoryRecorder, state_of
from autosplit.pipeline.ledger.call_memory import CallMemory
from autosplit.pipeline.ledger.prediction import Evicted, RankReplay
from autosplit.pipeline.schedule.schedule import Schedule, without_sharding
from autosplit.pipeline.simulation.transfer import MoveCosts
from autosplit.stage import Stage
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.state import distinct_storage_bytes, state_bytes

from .rank_state import RankState


def replay_of(mode: Mode, schedule: Schedule, calls: CallMemory) -> RankReplay | None:
    """Plays this rank's part of a schedule; None where a stage's graphs are not known.

    Args:
        mode: its stages are built.
        schedule: of the same placement.
        calls: knows what stages' calls hold.
    """
    stages = all_traced(mode.stages)
    if stages is None:
        return None
    return RankReplay(schedule, mode.rank, mode.feeds, stages, mode.negotiation.learn, calls)


class RankPrediction:
    """Predicts the most that a rank holds in a step beside its fixed owners, before it runs.

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
        return replay_of(self._mode, without_sharding(self._schedule), self._calls)


class RankLedger:
    """Records one step.

    Args:
        mode: what is run.
        held: the rank's share of the model.
        batch: those of the batch, None for what the rank does not take.
        times: records when what ran.
        device: where the stages run.
        calls: knows what stages' calls hold.

    Attributes:
        recorder: for the executor.
        prediction: of the same step.
    """

    def __init__(
        self,
        mode: Mode,
        held: RankState,
        batch: Sequence[Tensor | None],
        times: Recorder,
        device: torch.device,
        calls: CallMemory,
    ) -> None:
        self.prediction = RankPrediction(mode, batch, calls)
        self._moves = mode.moves
        stages = [each for each in mode.stages.values() if isinstance(each, Stage)]
        optimizer = held.optimizer_state
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

    def run(self, step: Callable[[], dict[int, Tensor]]) -> dict[int, Tensor]:
        """Run the step; its losses are the caller's."""
        losses = step()
        self.recorder.finish(losses.values())
        return losses

    def measured(self) -> dict[str, int]:
        """By action, the most that was held beside fixed owners and the batch: while it ran, or
        since the end of the one before it. Where there are moves, what there was at that end counts
        for that one alone, as it may have left since then.
        """
        found: dict[str, int] = {}
        between = last = 0
        for band in self.recorder.bands():
            level = band.activations - self.prediction.batch_bytes
            if band.during:
                found[band.during] = max(found.get(band.during, 0), level, between)
                between, last = 0, 0 if self._moves is None else level
            elif level > last:
                between = max(between, level)
        return found


class RankSize:
    """Bytes of a rank, fixed and by action, and how fast its store is.

    Args:
        held: what the rank holds.
        groups: the trainer's process groups.
        calls: knows what stages' calls hold.
        store: where the rank offloads, if it does.

    Attributes:
        mode: of the last step, whose stages are built; None before the first batch.
        batch_bytes: those of the batch.
        ledger: of the last step, where that was measured.
    """

    def __init__(
        self,
        held: RankState,
        groups: Groups,
        calls: CallMemory,
        store: HostStore | None,
    ) -> None:
        self._held, self._groups = held, groups
        self._calls, self._store = calls, store
        self.mode: Mode | None = None
        self.batch_bytes = 0
        self.ledger: RankLedger | None = None
        self._slowing: float | None = None

    def fixed_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer state and batch."""
        state = distinct_storage_bytes(state_of(self._held.modules.values()))
        trained = [p for p in self._held.parameters if p.requires_grad]
        gradients = sum(local_tensor(p).nbytes for p in trained)
        return state + gradients + state_bytes(self._held.optimizer) + self.batch_bytes

    def replay(self, schedule: Schedule) -> RankReplay | None:
        """Plays this rank's part of a schedule; None where a stage's graphs are not known."""
        return None if self.mode is None else replay_of(self.mode, schedule, self._calls)

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
        mode = self.mode
        noted = MoveCosts() if mode is None or mode.moves is None else mode.moves.times.costs()
        sends = 0.0 if mode is None else mode.messages.send_seconds
        heard = self._groups.everybody.gather((noted.leave, noted.come, sends))
        leave, come, send = (max(each) for each in zip(*heard, strict=True))
        return MoveCosts(leave, come, self._slowing, send)

    def _piece(self) -> int:
        """Bytes of a storage that stages hold, on the average."""
        stages = {} if self.mode is None else self.mode.stages
        pieces = [each for stage in stages.values() for each in stage_memory(stage).pieces]
        return int(sum(pieces) / max(1, len(pieces)))
