"""Runs the batches of a trainer through its schedule, on one rank.

    batch            the rank's own inputs and targets
      |
    StepPlan         the stages and the executor for its shape, agreed on by all ranks
      |
    microbatches     views of the batch along dimension 0
      |
    Executor.run     the rank's row of F, I and W; then gradients are reduced over copies
      |
    StepReduction    one all-reduce of losses and norm, which ends the step

``StepPlans`` agrees on the plan, and ``RankStages`` builds its stages.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autosplit.device import generators_kept
from autosplit.pipeline.builders.placement import with_full_backwards
from autosplit.pipeline.engine.evaluation import forward_only
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.moves import LANE, Moves
from autosplit.pipeline.engine.offload_target import OffloadTarget
from autosplit.pipeline.engine.partial_stage import AutogradStage
from autosplit.pipeline.engine.stage_builder import compile_stages
from autosplit.pipeline.engine.stage_factory import traced
from autosplit.pipeline.engine.stage_protocols import ForwardStage, StageFactory, TrainableStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.engine.timing import recorder_on
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.gathers import add_gathers
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.prepared import PreparedSchedule
from autosplit.pipeline.simulation.simulate import Span, window_of
from autosplit.ranks.first_error import Guard
from autosplit.ranks.groups import Groups
from autosplit.recorder.flight import FlightRecorder, backwards_after_bubbles
from autosplit.runtime.call_cache import CallCache
from autosplit.torch_internals.autograd import call_accumulate_hooks
from autosplit.torch_internals.pytree import tree_flatten
from autosplit.torch_internals.state import distinct_storage_bytes
from autosplit.trainer.agreement import StepReduction
from autosplit.trainer.auditing import Auditor
from autosplit.trainer.aux_losses import aux_sums, start_aux_losses
from autosplit.trainer.batch_agreement import summary_of
from autosplit.trainer.batches import (
    Batch,
    BatchSlot,
    BatchSplitter,
    Microbatches,
    MicrobatchList,
    deliver_gradients,
)
from autosplit.trainer.limited_schedules import LimitedSchedules
from autosplit.trainer.loss_gradients import (
    LossGradients,
    StepWeights,
    Weight,
    step_weights,
)
from autosplit.trainer.options import MEMORY
from autosplit.trainer.rank_memory import LargestMicrobatches, RankMemory
from autosplit.trainer.rank_model import RankModel
from autosplit.trainer.rank_stages import RankStages
from autosplit.trainer.stage_modules import Holder, LossFunction, Observer, StageSource
from autosplit.trainer.step_orders import StepOrders
from autosplit.trainer.step_plans import StepPlan, StepPlans
from autosplit.trainer.trained_parameters import GradientNorms
from autosplit.trainer.trainer_options import TrainerOptions
from autosplit.trainer.tuning import Tuner
from autosplit.trainer.verification import Gradients, Verification, differences, gradients_of

_LOG = logging.getLogger(__name__)


class Runner:
    """Runs batches on this rank: forward and backward in training, only forward in evaluation.

    The trainer calls each method inside of its guard, which reports errors to all ranks.

    Args:
        stages: the source of all stages of the model.
        loss_fn: the loss, which runs at the end of the last stage.
        schedule: the schedule of the first training step.
        options: the trainer's options.
        factory: makes a stage of a module.
        model: this rank's modules and parameters; stages are built from them at the first batch.
        groups: the trainer's process groups.
        guard: the trainer's guard.
        device: the device of the stages.
        store: the offload target of this rank; None if there is none.
        shared: groups of (stage, parameter name), each one parameter of the model.

    Attributes:
        dataflow: the dataflow between stages.
        schedule: the schedule of training; ``"auto"`` replaces it after the measured steps.
        stages: this rank's stages of the last training step; empty before the first.
        last_step: the plan of the last training step; None before the first.
        spans: the recorded actions of the last training step.
        memory: this rank's memory, predicted and recorded.
        record: whether to record ``spans``, and with ``"memory"`` also memory. Steps that
            ``"auto"`` measures always record ``spans``.
        clips: whether to compute the norm of the gradient.
        losses: computes the gradients of the losses, with weights and scale.
        flight: the flight recorder; None without one.
        auditor: chooses actions that run again; None without ``audit``.
    """

    def __init__(
        self,
        stages: StageSource,
        loss_fn: LossFunction,
        schedule: Schedule,
        options: TrainerOptions,
        factory: StageFactory,
        model: RankModel,
        groups: Groups,
        guard: Guard,
        device: torch.device,
        store: OffloadTarget | None,
        shared: Sequence[Sequence[Holder]] = (),
    ) -> None:
        self.record, self.clips = options.run.record, options.max_grad_norm is not None
        self._raises = options.run.on_nonfinite == "raise"
        self._checks_finite = options.run.on_nonfinite != "ignore"
        self._model, self._groups, self._guard = model, groups, guard
        self._device, self._store = device, store
        self._recorder = recorder_on(groups.rank, device)
        self.dataflow = StageDataflow(stages.count, stages.wiring)
        self._grad_dtype = grad_dtype = options.stages.split.grad_dtype
        self.memory = RankMemory(model, groups, self.dataflow, device, store, grad_dtype)
        self.limits = options.limits(len(schedule.ranks))
        self._tuner: Tuner | None = None
        if options.tunes:
            self._tuner = Tuner(schedule, groups, self.dataflow, self.memory, model, self.limits)
        audit = options.run.audit
        self.auditor = Auditor(groups, device, goes_on=audit == "mark") if audit else None
        sharded = model.sharded
        one_order = sharded.frees_after_actions or len(sharded.indices) > len(schedule.ranks)
        self._limited: LimitedSchedules | None = None
        if self._tuner is not None and self.limits:
            count = schedule.microbatches
            self._limited = LimitedSchedules(self._tuner, count, one_order=one_order)
        self.schedule = schedule
        self._shares_tensors = groups.layout.tensor_ranks > 1
        source = schedule.placement[self.dataflow.first_from_batch]
        self._seeds = StageSeeds(groups, device, schedule.stages, source)
        self._orders = StepOrders(options, schedule, self._limited, one_order=one_order)
        self._scales = options.run.scales
        self.losses = LossGradients(groups, schedule, device, options.run.scaler)
        self._last = self.schedule.stages - 1
        self._forwards: dict[int, Schedule] = {}
        self._executors = CallCache[Hashable, tuple[Schedule, Executor]]()
        self._reporting: Executor | None = None
        stages_here, wiring = schedule.stages_on(groups.rank), stages.wiring
        self._splitter = BatchSplitter(
            schedule.microbatches,
            device,
            inputs=self.dataflow.from_batch(stages_here),
            targets=self._last in stages_here,
            names=() if wiring is None else wiring.names,
            flattens=wiring is not None,
        )
        self._rank_stages = RankStages(
            stages,
            loss_fn,
            schedule,
            options,
            factory,
            model,
            groups,
            self.dataflow,
            self._seeds,
            device,
        )
        self.flight: FlightRecorder | None = None
        if options.run.recorder is not None:
            self.flight = FlightRecorder(
                options.run.recorder,
                model.modules,
                shared,
                groups,
                guard,
                self._seeds,
                device,
                scales=self._scales,
            )
        self._plans = StepPlans(
            self._splitter,
            self._seeds,
            groups,
            self.dataflow,
            model.modules,
            microbatches=schedule.microbatches,
            source=source,
            has_graphs=self._rank_stages.has_graphs,
            check=self._orders.check_steps,
            equal_counts=sharded.frees_after_actions,
        )
        self._grad_tensors: Mapping[BatchSlot, Sequence[Tensor]] = {}
        self.stages: Mapping[int, TrainableStage] = MappingProxyType({})
        self.last_step: StepPlan | None = None
        self.spans: list[Span] = []
        self._prepared = CallCache[Schedule, PreparedSchedule]()

    @property
    def settled(self) -> bool:
        """Whether the schedule is final: no more steps are measured to find a better one."""
        return self._tuner is None

    def train(
        self,
        batch: Batch | MicrobatchList | None,
        weight: Weight | None = None,
        *,
        waits: bool = True,
    ) -> StepReduction:
        """Run the schedule and add its gradients to the parameters' ``.grad``.

        Args:
            batch: see ``PipelineTrainer.step``.
            weight: see ``PipelineTrainer.step``.
            waits: whether to wait first until all ranks accept the batch. If one rank then refuses
                it, no rank runs it.

        Returns:
            The started all-reduce of losses and norm over all ranks.
        """
        weights = None if weight is None else step_weights(weight)
        plan, executor, inputs, targets = self._prepare_batch(batch, weights, waits=waits)
        loss_grads = plan.loss_grads
        if weights is not None or self._scales:
            part_names = plan.boundaries[0].part_names
            loss_grads = self.losses.of_step(plan.dtype, part_names, plan.pipeline_counts, weights)
        self._grad_tensors = self._splitter.requiring_grad(batch) if plan.grad_slots else {}
        self._batch_gradients = executor.batch_gradients
        model, memory, microbatches = self._model, self.memory, inputs + targets
        flight, auditor = self.flight, self.auditor if self._tuner is None else None
        measures = self._tuner is not None or (auditor is not None and auditor.period is None)
        is_timed = self.record or measures or flight is not None
        recorder = self._recorder if is_timed else None
        if flight is not None:
            reduces = model.reduces or self._scales
            tensors = _tensors(microbatches)
            flight.start_step(executor, self.stages, tensors, self._recorder, reduces=reduces)
        if auditor is not None:
            auditor.arrange_audits(executor, self.stages)
        memory.recorder = None
        recording: Any = contextlib.nullcontext(recorder)
        if self.record == MEMORY:
            memory.set_step(plan, self._largest_of(plan, inputs, targets))
            recording = memory.recording(plan, _tensors(microbatches), self._recorder)
        publishing = self._publishing(plan, self.stages)
        with self._seeds.restoring(), recording as recorder, publishing as hooked:
            losses = executor.run(inputs, targets, plan.boundaries, recorder, loss_grads)
            if recorder is not None and memory.recorder is not None:
                memory.recorder.finish(itertools.chain(*losses.values()))
        if hooked:
            call_accumulate_hooks(hooked)
        needs_norms = self.clips or self._checks_finite
        norms = model.trained.gradient_norms(squares=self.clips) if needs_norms else None
        for call in model.post_step:
            call()
        self.spans = recorder.spans() if recorder is not None else []
        self.last_step = plan
        if not plan.functions and len({*plan.microbatches}) == 1:
            graphs = traced(plan.stages)
            if len(graphs) == len(plan.stages):
                plan.functions = [stage.functions for stage in graphs.values()]
        if self._tuner is not None:
            self._tune(plan, self._tuner)
        if auditor is not None:
            auditor.measure_step(self.spans, executor.schedule, self.stages)
        checks: Sequence[float] = ()
        if flight is not None:
            checked = None if self.clips and not model.trained.counts_all else norms
            are_finite = checked is not None and not checked.nonfinite()
            checks = flight.end_actions(self.spans, are_finite=are_finite)
        reduction = self._start_reduction(plan, losses, microbatches, weights, norms, checks)
        if flight is not None:
            flight.checks_of_ranks = reduction.checks
        return reduction

    @contextlib.contextmanager
    def _publishing(self, plan: StepPlan, stages: Mapping[int, Any]) -> Iterator[list[Tensor]]:
        """Context around the actions of a step, which adds their gradients, reduced over copies, to
        ``.grad`` at its end.

        Its value is a list of the parameters whose hooks must be called then.
        """
        model, scale, hooked = self._model, self.losses.scale, list[Tensor]()
        reduces = model.reduces or self._scales
        with model.reducing_gradients(scale) if reduces else contextlib.nullcontext():
            for stage in stages.values():
                if hasattr(stage, "waiting_hooks"):
                    stage.waiting_hooks = hooked
            if plan.aux:
                mean_count = sum(plan.pipeline_counts) / len(plan.pipeline_counts)
                start_aux_losses(plan.aux, scale / mean_count)
            yield hooked
            for stage in stages.values():
                stage.publish()

    def _tune(self, plan: StepPlan, tuner: Tuner) -> None:
        """Pass the step's measurements to the tuner, and use the schedules that it decides on."""
        if not tuner.record_step(self.spans, [sizes.elements for sizes in plan.microbatches]):
            return
        self._tuner = None
        if self._limited is None:
            schedule = tuner.search_schedule(self.stages)
        else:
            self._limited.search_again(self.stages)
            self._connect_partners(self._limited)
            schedule = self._limited.schedules[0].schedule
        if self._orders.lists is not None:
            self._orders.lists.use_times(tuner.terms)
        self._change_schedule(schedule)

    def backward_batch(self) -> None:
        """Run the user's backward from the last batch's tensors that need a gradient."""
        if not self._grad_tensors:
            return
        count, divisor = self.schedule.microbatches, self._groups.layout.shares * self.losses.scale
        tensors, self._grad_tensors = self._grad_tensors, {}
        with self._guard.during("the backward of the batch's own tensors"):
            deliver_gradients(tensors, self._batch_gradients, count, divisor)

    def predict(self, batch: Batch | None) -> RankMemory:
        """Predict this rank's memory in a step with a batch, without running it.

        Builds the stages and chooses the schedule, as the step would do.
        """
        plan, _, inputs, targets = self._prepare_batch(batch, None)
        self.memory.recorder = None
        self.memory.set_step(plan, self._largest_of(plan, inputs, targets))
        return self.memory

    def _largest_of(
        self, plan: StepPlan, inputs: Microbatches, targets: Microbatches
    ) -> LargestMicrobatches:
        """The largest microbatches of a step, whose stages are built."""
        return LargestMicrobatches(
            self._rank_stages.functions_of_largest(plan, inputs, targets),
            [plan.boundaries[at] for at in plan.largest],
            distinct_storage_bytes(_tensors(inputs + targets)),
        )

    def _prepare_batch(
        self,
        batch: Batch | MicrobatchList | None,
        weights: StepWeights | None,
        *,
        waits: bool = True,
    ) -> tuple[StepPlan, Executor, Microbatches, Microbatches]:
        """Return (plan of a training step, its executor, inputs by microbatch, targets by
        microbatch).
        """
        for check in self._model.checks:
            check()
        plan, inputs, targets = self._plans.agree_on_plan(
            batch, weights, evaluates=False, waits=waits
        )
        executor = plan.executor
        if executor is None:
            schedule = self._build_step(plan, batch, inputs, targets)
            part_names = plan.boundaries[0].part_names
            plan.loss_grads = self.losses.of_step(plan.dtype, part_names, plan.pipeline_counts)
            executor = self._set_executor(plan, schedule, plan.stages)
        self.stages, self.memory.step = plan.stages, plan
        if self._reporting is not executor:
            self._reporting, self.schedule = executor, plan.schedule
            self._model.report_gradients(traced(plan.stages), self.schedule)
        return plan, executor, inputs, targets

    def _build_step(
        self,
        plan: StepPlan,
        batch: Batch | MicrobatchList | None,
        inputs: Microbatches,
        targets: Microbatches,
    ) -> Schedule:
        """Build the stages of a new step, and return its schedule, which is searched if the memory
        limit needs a new one; collective unless ``plan.is_built``.

        Raises:
            BatchError: on all ranks: a stage cannot take a microbatch, or no schedule keeps the
                memory limit.
        """
        orders, limited = self._orders, self._limited
        schedule = orders.schedule if plan.uncovered else orders.schedule_for(plan)
        self._rank_stages.build_stages(plan, schedule, batch, inputs, targets)
        if limited is not None and plan.uncovered:
            is_first = not limited.schedules
            limited.search(plan, plan.stages, self._largest_of(plan, inputs, targets))
            plan.uncovered = ()
            self._connect_partners(limited)
            schedule = orders.schedule_for(plan)
            if is_first:
                self._change_schedule(limited.schedules[0].schedule, plan)
            compile_stages(plan.stages, schedule)
        return schedule

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
            self._prepared.remember(schedule, PreparedSchedule(with_gathers, self.dataflow))
        return self._prepared[schedule]

    def _connect_partners(self, limited: LimitedSchedules) -> None:
        """Connect the ranks between which the limited schedules move activations, together with all
        replicas, of which some may run orders without moves; collective over all ranks.
        """
        for entry in limited.schedules:
            self._groups.connect(self._prepare(entry.schedule).partner_pairs, LANE)

    def _build_executor(
        self, plan: StepPlan, schedule: Schedule, stages: Mapping[int, ForwardStage]
    ) -> Executor:
        """Build an executor; collective over all ranks if it connects new pairs of ranks."""
        groups, sharded = self._groups, self._model.sharded
        prepared = self._prepare(schedule)
        groups.connect(prepared.pairs)
        routes, posts = prepared.routes[groups.rank], prepared.recv_posts[groups.rank]
        moves = watch = None
        if self.flight is not None and not plan.evaluates:
            bubbles = backwards_after_bubbles(schedule.ranks[groups.rank], self._last)
            watch = partial(self.flight.watch, bubbles)
        if prepared.moves:
            moves = Moves(stages, prepared, groups, self._device, self._store)
        return Executor(
            stages,
            prepared.schedule,
            groups.rank,
            Transport(routes, groups, device=self._device, posts=posts),
            activity=groups.activity,
            moves=moves,
            batch_arguments=self._batch_arguments(plan),
            seeds=self._seeds,
            sharding=sharded if sharded.indices else None,
            watch=watch,
        )

    def _batch_arguments(self, plan: StepPlan) -> dict[int, dict[int, BatchSlot]]:
        """Return the batch slots of those arguments of stages that need a gradient.

        The keys are a stage of this rank, then the argument's position among the stage's arguments.
        """
        arguments: dict[int, dict[int, BatchSlot]] = {stage: {} for stage in self._model.modules}
        targets = len(plan.microbatches[0].targets)
        for name, number in plan.grad_slots:
            for stage, slots in arguments.items():
                if name == "inputs":
                    places = self.dataflow.batch_places(stage, number)
                else:  # targets are the last arguments
                    places = [number - targets] if stage == self._last else []
                slots |= dict.fromkeys(places, (name, number))
        return arguments

    def compare_gradients(
        self, batch: Batch | MicrobatchList | None, weight: Weight | None = None
    ) -> Verification:
        """Compare the gradients of a step with the gradients of a reference; no state changes.

        Args:
            batch: see ``PipelineTrainer.step``.
            weight: see ``PipelineTrainer.step``.
        """
        weights = None if weight is None else step_weights(weight)
        step, model = (self.stages, self.memory.step), self._model
        is_plain = not (self._shares_tensors or model.sharded.indices)
        gradients: list[Gradients] = []
        with generators_kept():
            plan, executor, inputs, targets = self._prepare_batch(batch, weights)
            part_names = plan.boundaries[0].part_names
            loss_grads = self.losses.of_step(plan.dtype, part_names, plan.pipeline_counts, weights)
            stages: Mapping[int, Any] = plan.stages
            if is_plain:
                modules = self._rank_stages.complete(batch).items()
                stages = {at: AutogradStage(m, at, self._grad_dtype) for at, m in modules}
            other = self._build_executor(plan, with_full_backwards(executor.schedule), stages)
            self._reporting = None
            executor.set_audits((), ())
            for run, stages in ((other, stages), (executor, plan.stages)):  # noqa: B020
                model.report_gradients(traced(stages), run.schedule)
                with self._seeds.restoring(), model.preserving_state():
                    with self._publishing(plan, stages):
                        run.run(inputs, targets, plan.boundaries, None, loss_grads)
                    for call in model.post_step:
                        call()
                    gradients.append(gradients_of(model.modules))
        self.stages, self.memory.step = step
        reference, computed = gradients
        parts = self._groups.everybody.gather([*differences(computed, reference)])
        distinct = {difference for part in parts for difference in part}
        return Verification(is_plain, sorted(distinct, reverse=True))

    def evaluate(
        self,
        batch: Batch | MicrobatchList | None,
        weight: Weight | None = None,
        observer: Observer | None = None,
    ) -> StepReduction:
        """Run only forwards, on the modules themselves and without graphs.

        Args:
            batch: see ``PipelineTrainer.step``.
            weight: see ``PipelineTrainer.evaluate``.
            observer: a function that is called with the arguments of the loss, on the rank that
                computes the loss.

        Returns:
            The started all-reduce of the losses over all ranks.
        """
        weights = None if weight is None else step_weights(weight)
        plan, inputs, targets = self._plans.agree_on_plan(batch, weights, evaluates=True)
        executor = plan.executor
        if executor is None:
            stages, count = self._rank_stages.for_evaluation(plan, batch), len(plan.microbatches)
            if count not in self._forwards:
                self._forwards[count] = forward_only(self.schedule, count)
            executor = self._set_executor(plan, self._forwards[count], stages)
        self._rank_stages.observer = observer
        if plan.aux:
            start_aux_losses(plan.aux, 0.0)
        with self._seeds.restoring():
            losses = executor.run(inputs, targets, plan.boundaries)
        self._rank_stages.observer = None
        for call in self._model.post_step:
            call()
        if plan.listed:
            self._rank_stages.refuse_misfits(plan)
        self._rank_stages.set_loss_of_evaluation(plan, losses)
        return self._start_reduction(plan, losses, inputs + targets, weights)

    def _change_schedule(self, schedule: Schedule, plan: StepPlan | None = None) -> None:
        """Use another schedule from the next step on, or from that of ``plan``; collective over all
        ranks.
        """
        _LOG.info("the schedule from the next step on: %r", schedule)
        self.schedule = self._orders.schedule = schedule
        plans = self._plans.of_training() or ([] if plan is None else [plan])
        if plans and self._groups.layout.shares > 1:
            self._model.arrange_buckets(traced(plans[0].stages), schedule)
            self._reporting = None
        for plan in plans:
            of_any_count = self._orders.lists is not None or self._limited is not None
            if of_any_count or len(plan.microbatches) == schedule.microbatches:
                of_plan = self._orders.schedule_for(plan)
                compile_stages(plan.stages, of_plan)
                self._set_executor(plan, of_plan, plan.stages)

    def _start_reduction(
        self,
        plan: StepPlan,
        losses: Mapping[int, list[Tensor]],
        batch: Microbatches,
        weights: StepWeights | None,
        norms: GradientNorms | None = None,
        checks: Sequence[float] = (),
    ) -> StepReduction:
        """Start the all-reduce of losses, gradient norms, checks and the batch's checksum."""
        nonfinite, window = None, (0.0, 0.0)
        if self.spans and not plan.evaluates:
            window = window_of(self.spans)
        if norms is not None and self._checks_finite:
            nonfinite = self._model.trained.nonfinite_stage(norms)
        tensors = _tensors(batch) if self._shares_tensors else []
        if weights is not None:
            numbers = weights.of_each(len(plan.microbatches))
            row = torch.tensor(numbers, dtype=torch.float64, device="cpu")
            tensors.append(row)
            for microbatch, outputs in losses.items():
                outputs.append(row[microbatch])
        return StepReduction(
            self._groups,
            self._guard,
            losses,
            counts=plan.pipeline_counts,
            end=self.schedule.placement[self._last],
            squares=norms.squares() if norms is not None and self.clips else None,
            nonfinite=nonfinite,
            raises=self._raises,
            window=window,
            batch=summary_of(tensors) if self._shares_tensors else 0,
            dtype=plan.dtype,
            part_names=plan.boundaries[0].part_names,
            weighted=plan.is_weighted,
            aux=aux_sums(plan.aux) if plan.aux else {},
            checks=checks,
        )


def _tensors(batch: Microbatches) -> list[Tensor | None]:
    tensors: list[Tensor | None] = []
    for microbatch in batch:
        for value in microbatch:
            leaves = [value] if value is None or type(value) is Tensor else tree_flatten(value)[0]
            tensors += [leaf for leaf in leaves if leaf is None or isinstance(leaf, Tensor)]
    return tensors
