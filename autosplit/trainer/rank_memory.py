"""Predict the memory of one rank in a step, for the search for a schedule within a limit, and
record the memory that a step really takes.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.mesh.costs import Link
from autosplit.pipeline.engine.boundaries import Boundaries
from autosplit.pipeline.engine.executor import joined_weights
from autosplit.pipeline.engine.moves import Moves
from autosplit.pipeline.engine.offload_target import OffloadTarget, measure_offload
from autosplit.pipeline.engine.stage_factory import traced
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.engine.timing import SpanRecorder
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.ledger.bands import MemoryRecorder, state_of
from autosplit.pipeline.ledger.call_memory import CallMemory
from autosplit.pipeline.ledger.prediction import (
    StageBytes,
    graph_memory,
    largest_boundaries,
    message_levels,
    received_bytes,
    stage_memory,
)
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory, largest_memory, levels_of
from autosplit.ranks.groups import Groups
from autosplit.runtime.functions import SplitFunctions
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.state import distinct_storage_bytes, state_bytes, storage_sizes
from autosplit.trainer.gradient_buckets import GradientBucket
from autosplit.trainer.rank_model import RankModel
from autosplit.trainer.step_plans import StepPlan


class LargestMicrobatches(NamedTuple):
    """The largest microbatches of a step, from which the memory of all of them follows.

    Attributes:
        functions: for each, by stage of this rank, the stage's functions at its sizes; empty if a
            stage has no graphs.
        boundaries: for each, the tensors between stages.
        batch_bytes: the bytes of the batch.
    """

    functions: Sequence[Mapping[int, SplitFunctions]]
    boundaries: Sequence[Boundaries]
    batch_bytes: int


class RankMemory:
    """The fixed bytes of a rank, its bytes in a step, and the speed of its offload target.

    Fixed bytes are those of parameters, gradients and optimizer state.

    Args:
        model: the rank's modules and optimizer.
        groups: the trainer's process groups.
        dataflow: the dataflow between stages.
        device: the device of the stages.
        store: the rank's offload target; None if the rank has none.
        grad_dtype: the dtype of the sums of gradients; None for each parameter's dtype.

    Attributes:
        step: the plan of the step that was prepared last; None before the first step.
        largest: the microbatches for which memory is predicted; None before they are set.
        recorder: the recorder of the last step; None if the step's memory was not recorded.
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
        self._calls = CallMemory(device, grad_dtype)
        self.step: StepPlan | None = None
        self.largest: LargestMicrobatches | None = None
        self._schedule: Schedule | None = None
        self.recorder: MemoryRecorder | None = None

    def set_step(self, step: StepPlan, largest: LargestMicrobatches) -> None:
        """Set the step that is predicted and recorded.

        Args:
            step: the plan of the step, with its stages built.
            largest: the largest microbatches of the step.
        """
        self.step, self.largest = step, largest
        self._schedule = None if step.executor is None else step.executor.schedule

    @property
    def batch_bytes(self) -> int:
        """The bytes of the batch of the step that is predicted."""
        return 0 if self.largest is None else self.largest.batch_bytes

    @property
    def _traffic(self) -> tuple[Transport | None, Moves | None]:
        """(transport of messages, moves) of ``step``; (None, None) without an executor."""
        executor = None if self.step is None else self.step.executor
        return (None, None) if executor is None else (executor.messages, executor.moves)

    def fixed_bytes(self) -> int:
        """The bytes of parameters, gradients and optimizer state."""
        return sum(self.fixed_by_owner())

    def fixed_by_owner(self) -> tuple[int, int, int]:
        """(bytes of parameters and buffers, of gradients, of optimizer state)."""
        state = distinct_storage_bytes(state_of(self._model.modules.values()))
        trained = [p for p in self._model.trained.parameters if p.requires_grad]
        gradients = sum(
            local_tensor(p).numel() * (self._grad_dtype or p.dtype).itemsize for p in trained
        )
        gradients += sum(bucket.flag_bytes for bucket in self._written_buckets)
        return state, gradients, state_bytes(self._model.trained.optimizer)

    @property
    def _written_buckets(self) -> list[GradientBucket]:
        """The buckets into which W writes gradients, which are allocated during the actions."""
        return self._model.buckets.written_by_weights(self._grad_dtype)

    # --- predicted --------------------------------------------------------------------------------

    def levels(
        self, schedule: Schedule, largest: LargestMicrobatches | None = None
    ) -> list[int] | None:
        """Predict the bytes during each action of this rank's row; collective over the pipeline.

        Args:
            schedule: the schedule.
            largest: the largest microbatches; all are assumed to be as large. None: those of the
                step that is set.

        Returns:
            Per action of the row, the peak in bytes, without fixed bytes and the batch; None if a
            stage has no graphs.
        """
        rank, dataflow, row = self._groups.rank, self._dataflow, schedule.ranks[self._groups.rank]
        largest = largest or self.largest
        sizes = self._stage_bytes(largest, {action.kind for action in row})
        largest_here = {at: largest_memory([r.memory for r in rows]) for at, rows in sizes.items()}
        memory = [StageMemory(0.0, 0.0)] * schedule.stages  # zero if the graphs are unknown
        for part in self._groups.gather(largest_here):
            for index, most in part.items():
                memory[index] = most
        if largest is None or not sizes:
            return None
        borrowed = {
            index: set.intersection(*(row.borrowed_outputs for row in rows))
            for index, rows in sizes.items()
        }
        boundaries = largest_boundaries(largest.boundaries)
        messages = message_levels(schedule, rank, dataflow, boundaries, borrowed)
        levels, has_buckets = [], bool(self._written_buckets)
        state = levels_of(schedule, memory)[rank]
        stages = {} if self.step is None else self.step.stages
        for action, kept, sent in zip(row, state, messages, strict=True):
            # The first action that makes gradients needs no sum beside them, unless it writes them
            # into buckets.
            is_fresh = action.kind.is_compute and not has_buckets
            rows = sizes[action.stage] if is_fresh else []
            saved = min((row.fresh.pop(action.kind, 0) for row in rows), default=0)
            levels.append(math.ceil(kept) + sent - saved)
        for at, count in joined_weights(row, stages):
            levels[at] += max(size.joined_weight(count) for size in sizes[row[at].stage])
        if (sharded := self._model.sharded).indices:
            levels = [*map(sum, zip(levels, sharded.levels(schedule), strict=True))]
        return levels

    def _stage_bytes(
        self, largest: LargestMicrobatches | None, kinds: Collection[ActionKind]
    ) -> dict[int, list[StageBytes]]:
        """For each stage of this rank, the bytes of each of the largest microbatches; empty if a
        stage has no graphs.
        """
        rows = defaultdict[int, list[StageBytes]](list)
        pairs = () if largest is None else zip(*largest[:2], strict=False)
        for by_stage, boundaries in pairs:
            for index, functions in by_stage.items():
                received = received_bytes(functions, index, self._dataflow, boundaries)
                rows[index].append(StageBytes(functions, self._calls, received, kinds))
        return rows

    def stage_memory(
        self, stages: Mapping[int, TrainableStage], largest: LargestMicrobatches
    ) -> dict[int, StageMemory]:
        """Map each stage to the bytes that it keeps for a microbatch: the maximum over
        ``largest``."""
        if not largest.functions:
            return {index: stage_memory(stage) for index, stage in stages.items()}
        return {
            index: largest_memory([graph_memory(row[index]) for row in largest.functions])
            for index in stages
        }

    def predicted(self) -> int | None:
        """Predict the peak of the set step in bytes, without fixed bytes; collective.

        None if no step is set, or if a stage has no graphs.
        """
        if self._schedule is None:
            return None
        levels = self.levels(self._schedule)
        return None if levels is None else max(levels, default=0) + self.batch_bytes

    # --- recorded ---------------------------------------------------------------------------------

    @property
    def recorded_peak(self) -> int | None:
        """The most bytes that the rank held in the last step; None if they were not recorded."""
        recorder = self.recorder
        return None if recorder is None else max(band.total for band in recorder.bands())

    @contextlib.contextmanager
    def recording(
        self, step: StepPlan, batch: Sequence[Tensor | None], times: SpanRecorder
    ) -> Iterator[MemoryRecorder]:
        """Context that records the memory of the step that runs inside.

        Args:
            step: the step of ``set_step``.
            batch: the tensors of the batch; None for tensors that the rank does not use.
            times: the recorder of the actions' times.
        """
        (messages, moves), model = self._traffic, self._model
        stages = traced(step.stages).values()
        state = storage_sizes([*state_of(model.modules.values()), *model.trained.optimizer_state])

        def holdings(arguments: Iterable[Tensor]) -> tuple[int, int]:
            """(fixed bytes, all bytes) that the rank holds now, with the next call's arguments."""
            sums = (gradient for stage in stages for gradient in stage.gradients.values())
            gradients = [*(parameter.grad for parameter in model.trained.parameters), *sums]
            kept = [
                *batch,
                *arguments,
                *(tensor for stage in stages for tensor in stage.saved_tensors),
                *(tensor for stage in stages for tensor in stage.deferred_tensors),
                *([] if messages is None else messages.message_tensors),
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
        """Measure the link of the slowest rank to its offload target; collective.

        Raises:
            PipelineError: no rank has an offload target.
        """
        measured = None if self._store is None else measure_offload(self._store)
        gathered = self._groups.everybody.gather(measured)
        links = [link for link in gathered if link is not None]
        if not links:
            raise PipelineError(
                "no rank has an offload target to measure: the schedule offloads nothing. Choose a "
                "schedule with OFFLOAD actions, or a memory_limit= that needs them"
            )
        return Link(max(link.latency for link in links), min(link.bandwidth for link in links))
