"""The executors of step plans, and the schedules that they run.

    StepPlan  ->  StepOrders        the schedule for the plan's microbatches
              ->  RankStages        the stages for their sizes
              ->  Executor          both, with the messages between ranks

A tuner measures the first steps. Afterwards, plans get executors for a better schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from autosplit.pipeline.builders.placement import with_full_backwards
from autosplit.pipeline.engine.evaluation import forward_only
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.moves import LANE, Moves
from autosplit.pipeline.engine.offload_target import OffloadTarget
from autosplit.pipeline.engine.stage_builder import compile_stages
from autosplit.pipeline.engine.stage_factory import traced
from autosplit.pipeline.engine.stage_protocols import ForwardStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.gathers import add_gathers
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.prepared import PreparedSchedule
from autosplit.pipeline.simulation.simulate import Span
from autosplit.ranks.groups import Groups
from autosplit.recorder.flight import FlightRecorder, backwards_after_bubbles
from autosplit.runtime.call_cache import CallCache
from autosplit.torch_internals.state import distinct_storage_bytes
from autosplit.trainer.batches import Batch, BatchSlot, Microbatches, MicrobatchList, tensors_of
from autosplit.trainer.limited_schedules import LimitedSchedules
from autosplit.trainer.rank_memory import LargestMicrobatches, RankMemory
from autosplit.trainer.rank_model import RankModel
from autosplit.trainer.rank_stages import RankStages
from autosplit.trainer.step_orders import StepOrders
from autosplit.trainer.step_plans import StepPlan
from autosplit.trainer.trainer_options import TrainerOptions
from autosplit.trainer.tuning import Tuner

_LOG = logging.getLogger(__name__)


class StepExecutors:
    """Builds the executors of step plans, and changes their schedules.

    Args:
        schedule: the schedule of the first training step.
        options: the trainer's options.
        model: this rank's modules and parameters.
        groups: the trainer's process groups.
        dataflow: the dataflow between stages.
        memory: this rank's memory.
        stages: builds this rank's stages.
        seeds: the seeds of stages that draw random numbers.
        device: the device of the stages.
        store: the offload target of this rank; None if there is none.
        flight: the flight recorder; None without one.

    Attributes:
        current_schedule: the schedule of training; ``"auto"`` replaces it after the measured steps.
        tuner: measures steps to find a better schedule; None once the schedule is final.
        current: the executor of the last training step; None before the first, or if the stages
            must report their gradients for another schedule.
    """

    tuner: Tuner | None = None
    current: Executor | None = None

    def __init__(
        self,
        schedule: Schedule,
        options: TrainerOptions,
        model: RankModel,
        groups: Groups,
        dataflow: StageDataflow,
        memory: RankMemory,
        stages: RankStages,
        seeds: StageSeeds,
        device: torch.device,
        store: OffloadTarget | None,
        flight: FlightRecorder | None,
    ) -> None:
        self._model, self._groups, self._dataflow = model, groups, dataflow
        self._stages, self._seeds = stages, seeds
        self._device, self._store, self._flight = device, store, flight
        limits = options.limits(len(schedule.ranks))
        if options.tunes:
            self.tuner = Tuner(schedule, groups, dataflow, memory, model, limits)
        sharded = model.sharded
        one_order = sharded.frees_after_actions or len(sharded.indices) > len(schedule.ranks)
        self._limited: LimitedSchedules | None = None
        if self.tuner is not None and limits:
            count = schedule.microbatches
            self._limited = LimitedSchedules(self.tuner, count, one_order=one_order)
        self.current_schedule = schedule
        self._orders = StepOrders(options, schedule, self._limited, one_order=one_order)
        self.check_steps = self._orders.check_steps
        self._forwards: dict[int, Schedule] = {}
        self._executors = CallCache[Hashable, tuple[Schedule, Executor]]()
        self._prepared = CallCache[Schedule, PreparedSchedule]()

    def build_training(
        self,
        plan: StepPlan,
        batch: Batch | MicrobatchList | None,
        inputs: Microbatches,
        targets: Microbatches,
    ) -> Executor:
        """Build the stages and the executor of a new training plan. If the memory limit needs a new
        schedule, it is searched. Collective unless ``plan.is_built``.

        Raises:
            BatchError: on all ranks: a stage cannot take a microbatch, or no schedule keeps the
                memory limit.
        """
        orders, limited = self._orders, self._limited
        schedule = orders.schedule if plan.uncovered else orders.schedule_for(plan)
        self._stages.build_stages(plan, schedule, batch, inputs, targets)
        if limited is not None and plan.uncovered:
            is_first = not limited.schedules
            limited.search(plan, plan.stages, self.largest_of(plan, inputs, targets))
            plan.uncovered = ()
            self._connect_partners(limited)
            schedule = orders.schedule_for(plan)
            if is_first:
                self._change_schedule(limited.schedules[0].schedule, [plan])
            compile_stages(plan.stages, schedule)
        return self._set_executor(plan, schedule, plan.stages)

    def build_forwards(self, plan: StepPlan, stages: Mapping[int, ForwardStage]) -> Executor:
        """Build the executor of an evaluation, which only runs forwards."""
        count = len(plan.microbatches)
        if count not in self._forwards:
            self._forwards[count] = forward_only(self.current_schedule, count)
        return self._set_executor(plan, self._forwards[count], stages)

    def build_reference(
        self, plan: StepPlan, executor: Executor, stages: Mapping[int, ForwardStage]
    ) -> Executor:
        """Build an executor that runs a plan's schedule with full backwards, on other stages."""
        self.current = None
        return self._build_executor(plan, with_full_backwards(executor.schedule), stages)

    def set_current(self, plan: StepPlan, executor: Executor) -> None:
        """Let the stages of a training plan report their gradients as its schedule needs it."""
        self.current, self.current_schedule = executor, plan.schedule
        self._model.report_gradients(traced(plan.stages), self.current_schedule)

    def largest_of(
        self, plan: StepPlan, inputs: Microbatches, targets: Microbatches
    ) -> LargestMicrobatches:
        """The largest microbatches of a step, whose stages are built."""
        return LargestMicrobatches(
            self._stages.functions_of_largest(plan, inputs, targets),
            [plan.boundaries[at] for at in plan.largest],
            distinct_storage_bytes(tensors_of(inputs + targets)),
        )

    def tune(self, spans: Sequence[Span], plan: StepPlan, plans: Sequence[StepPlan]) -> None:
        """Pass a step's measurements to the tuner, and use the schedules that it decides on.

        Args:
            spans: the recorded actions of the step.
            plan: the plan of the step.
            plans: the plans of all training steps so far.
        """
        tuner, limited = self.tuner, self._limited
        elements = [sizes.elements for sizes in plan.microbatches]
        if tuner is None or not tuner.record_step(spans, elements):
            return
        self.tuner = None
        if limited is None:
            schedule = tuner.search_schedule(plan.stages)
        else:
            limited.search_again(plan.stages)
            self._connect_partners(limited)
            schedule = limited.schedules[0].schedule
        if self._orders.lists is not None:
            self._orders.lists.use_times(tuner.terms)
        self._change_schedule(schedule, plans)

    def _change_schedule(self, schedule: Schedule, plans: Sequence[StepPlan]) -> None:
        """Use another schedule from the next step of these plans on; collective over all ranks."""
        _LOG.info("the schedule from the next step on: %r", schedule)
        self.current_schedule = self._orders.schedule = schedule
        if plans and self._groups.layout.shares > 1:
            self._model.arrange_buckets(traced(plans[0].stages), schedule)
            self.current = None
        for plan in plans:
            of_any_count = self._orders.lists is not None or self._limited is not None
            if of_any_count or len(plan.microbatches) == schedule.microbatches:
                of_plan = self._orders.schedule_for(plan)
                compile_stages(plan.stages, of_plan)
                self._set_executor(plan, of_plan, plan.stages)

    def _set_executor(
        self, plan: StepPlan, schedule: Schedule, stages: Mapping[int, ForwardStage]
    ) -> Executor:
        """Set a plan's executor, which runs stages by a schedule. Plans with the same stages and
        schedule share an executor.
        """
        key = id(schedule), id(stages), plan.grad_slots
        if key not in self._executors:
            built = self._build_executor(plan, schedule, stages)
            self._executors.remember(key, (schedule, built))  # both stay alive, and their numbers
        plan.schedule, plan.executor = self._executors[key]
        return plan.executor

    def _prepare(self, schedule: Schedule) -> PreparedSchedule:
        """A schedule with the gathers of sharded stages, and what follows from it."""
        if schedule not in self._prepared:
            with_gathers = add_gathers(schedule, self._model.sharded.indices)
            self._prepared.remember(schedule, PreparedSchedule(with_gathers, self._dataflow))
        return self._prepared[schedule]

    def _connect_partners(self, limited: LimitedSchedules) -> None:
        """Connect the ranks between which the limited schedules move activations, together with all
        replicas, of which some may run orders without moves; collective over all ranks.
        """
        for entry in limited.schedules:
            self._groups.connect(self._prepare(entry.schedule).partner_pairs, LANE)

    def _build_executor(
        self, plan: StepPlan, schedule: Schedule, stages: Mapping[int, Any]
    ) -> Executor:
        """Build an executor; collective over all ranks if it connects new pairs of ranks."""
        groups, sharded = self._groups, self._model.sharded
        prepared = self._prepare(schedule)
        groups.connect(prepared.pairs)
        routes, posts = prepared.routes[groups.rank], prepared.recv_posts[groups.rank]
        moves = watch = None
        if self._flight is not None and not plan.evaluates:
            bubbles = backwards_after_bubbles(schedule.ranks[groups.rank], schedule.stages - 1)
            watch = partial(self._flight.watch, bubbles)
        if prepared.moves:
            moves = Moves(stages, prepared, groups, self._device, self._store)
        return Executor(
            stages,
            prepared.schedule,
            groups.rank,
            Transport(routes, groups, device=self._device, posts=posts),
            activity=groups.activity,
            moves=moves,
            batch_arguments=self._batch_arguments(plan, schedule.stages - 1),
            seeds=self._seeds,
            sharding=sharded if sharded.indices else None,
            watch=watch,
        )

    def _batch_arguments(self, plan: StepPlan, last: int) -> dict[int, dict[int, BatchSlot]]:
        """Return the batch slots of those arguments of stages that need a gradient.

        The keys are a stage of this rank, then the argument's position among the stage's arguments.

        Args:
            plan: the plan of the step.
            last: the last stage.
        """
        arguments: dict[int, dict[int, BatchSlot]] = {stage: {} for stage in self._model.modules}
        targets = len(plan.microbatches[0].targets)
        for name, number in plan.grad_slots:
            for stage, slots in arguments.items():
                if name == "inputs":
                    places = self._dataflow.batch_places(stage, number)
                else:  # targets are the last arguments
                    places = [number - targets] if stage == last else []
                slots |= dict.fromkeys(places, (name, number))
        return arguments
