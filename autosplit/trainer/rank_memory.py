"""What one rank of a trainer holds in a step: predicted, recorded, and told to a search."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.mesh.costs import Link
from autosplit.pipeline.engine.moves import Moves
from autosplit.pipeline.engine.offload_target import OffloadTarget, measure_offload
from autosplit.pipeline.engine.stage_builder import traced
from autosplit.pipeline.engine.timing import Recorder
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.ledger.bands import MemoryRecorder, state_of
from autosplit.pipeline.ledger.call_memory import CallMemory
from autosplit.pipeline.ledger.prediction import StageBytes, message_levels, received_bytes
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory, levels_of
from autosplit.ranks.groups import Groups
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.state import distinct_storage_bytes, state_bytes, storage_sizes
from autosplit.trainer.rank_model import RankModel

if TYPE_CHECKING:
    from autosplit.trainer.runner import StepPlan


class RankMemory:
    """Bytes of a rank, fixed and in a step, and how fast its store is.

    Args:
        model: what the rank holds.
        groups: the trainer's process groups.
        dataflow: the dataflow between stages.
        device: where the stages run.
        store: where the rank offloads, if it does.
        grad_dtype: of the sums of gradients; None for that of each parameter.

    Attributes:
        step: runs the last batch.
        recorder: what recorded the last step; None where nothing did.
        batch_bytes: of the batch of the step that is known here.
    """

    def __init__(
        self,
        model: RankModel,
        groups: Groups,
        dataflow: StageDataflow,
        device: torch.device,
        store: OffloadTarget | None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        self._grad_dtype = grad_dtype
        self._model, self._groups, self._dataflow = model, groups, dataflow
        self._device, self._store = device, store
        self._calls = CallMemory(device)
        self.step: StepPlan | None = None
        self._schedule: Schedule | None = None
        self.batch_bytes = 0
        self.recorder: MemoryRecorder | None = None

    def know(self, step: StepPlan, batch: Sequence[Tensor | None]) -> None:
        """Get to know a step.

        Args:
            step: runs it; its stages are built.
            batch: the tensors of the batch, None for what the rank does not take.
        """
        self.step = step
        self._schedule = None if step.executor is None else step.executor.schedule
        self.batch_bytes = distinct_storage_bytes(batch)

    @property
    def _traffic(self) -> tuple[Transport | None, Moves | None]:
        """What carries messages and moves in the last step."""
        executor = None if self.step is None else self.step.executor
        return (None, None) if executor is None else (executor.messages, executor.moves)

    def fixed_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state."""
        state = distinct_storage_bytes(state_of(self._model.modules.values()))
        trained = [p for p in self._model.parameters if p.requires_grad]
        gradients = sum(
            local_tensor(p).numel() * (self._grad_dtype or p.dtype).itemsize for p in trained
        )
        return state + gradients + state_bytes(self._model.optimizer)

    # --- predicted --------------------------------------------------------------------------------

    def levels(self, schedule: Schedule) -> list[int] | None:
        """For each action of this rank's row of a schedule, the most that it is to hold while it
        runs, beside fixed ones and the batch; None where a stage's graphs are not known. Collective
        over the pipeline.
        """
        step, rank, dataflow = self.step, self._groups.rank, self._dataflow
        row, known = schedule.ranks[rank], dict[int, StageBytes]()
        stages = {} if step is None else traced(step.stages)
        if step is not None and len(stages) == len(step.stages):
            kinds = {action.kind for action in row}
            for index, stage in stages.items():
                received = received_bytes(stage, dataflow, step.boundaries)
                known[index] = StageBytes(stage, self._calls, received, kinds)
        sizes = [StageMemory(0.0, 0.0)] * schedule.stages  # of which nothing moves here
        for part in self._groups.gather({index: each.memory for index, each in known.items()}):
            for index, size in part.items():
                sizes[index] = size
        if step is None or not known:
            return None
        lent = {index: each.borrowed_outputs for index, each in known.items()}
        messages = message_levels(schedule, rank, dataflow, step.boundaries, lent)
        found = []
        for action, own, sent in zip(row, levels_of(schedule, sizes)[rank], messages, strict=True):
            # The first to make gradients adds to none.
            less = known[action.stage].fresh.pop(action.kind, 0) if action.kind.is_compute else 0
            found.append(math.ceil(own) + sent - less)
        return found

    def predicted(self) -> int | None:
        """The most bytes that the step that is known here holds beside fixed ones; None where
        nothing is known of a stage. Collective.
        """
        if self._schedule is None:
            return None
        levels = self.levels(self._schedule)
        return None if levels is None else max(levels, default=0) + self.batch_bytes

    # --- recorded ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(
        self, step: StepPlan, batch: Sequence[Tensor | None], times: Recorder
    ) -> Iterator[MemoryRecorder]:
        """Around a step, which the recorder is for.

        Args:
            step: see ``know``.
            batch: likewise.
            times: records when what ran.
        """
        self.know(step, batch)
        (messages, moves), model = self._traffic, self._model
        stages = traced(step.stages).values()
        state = storage_sizes([*state_of(model.modules.values()), *model.optimizer_state])

        def holdings() -> tuple[int, int]:
            sums = (each for stage in stages for each in stage.gradients.values())
            gradients = [*(parameter.grad for parameter in model.parameters), *sums]
            kept = [
                *batch,
                *(each for stage in stages for each in stage.saved_tensors),
                *(each for stage in stages for each in stage.deferred_tensors),
                *([] if messages is None else messages.tensors),
                *([] if moves is None else moves.storages_in_transit),
            ]
            fixed = state | storage_sizes(gradients)
            return sum(fixed.values()), sum((fixed | storage_sizes(kept)).values())

        beside = None if moves is None else moves.transferred.peak
        self.recorder = MemoryRecorder(times, holdings, self._device, beside=beside)
        counted = contextlib.nullcontext() if moves is None else moves.counted()
        with self.recorder.recording(), counted:
            yield self.recorder

    # --- the store --------------------------------------------------------------------------------

    def host_link(self) -> Link:
        """The slowest rank's link to its store; collective.

        Raises:
            PipelineError: no rank has a store.
        """
        own = None if self._store is None else measure_offload(self._store)
        known = [each for each in self._groups.everybody.gather(own) if each is not None]
        if not known:
            raise PipelineError("no rank has a store that could be measured: nothing is offloaded")
        return Link(max(each.latency for each in known), min(each.bandwidth for each in known))
