"""The parts of a rank that run its steps, put together once from the trainer's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from autosplit.pipeline.engine.offload_target import OffloadTarget
from autosplit.pipeline.engine.stage_protocols import StageFactory, TrainableStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.engine.timing import recorder_on
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.simulate import Span
from autosplit.ranks.first_error import Guard
from autosplit.ranks.groups import Groups
from autosplit.recorder.flight import FlightRecorder
from autosplit.trainer.auditing import Auditor
from autosplit.trainer.batches import BatchSlot, BatchSplitter
from autosplit.trainer.completed_modules import CompletedModules
from autosplit.trainer.evaluation_stages import EvaluationStages
from autosplit.trainer.loss_gradients import LossGradients
from autosplit.trainer.rank_memory import RankMemory
from autosplit.trainer.rank_model import RankModel
from autosplit.trainer.rank_stages import RankStages
from autosplit.trainer.stage_modules import Holder, LossFunction, StageSource
from autosplit.trainer.step_executors import StepExecutors
from autosplit.trainer.step_plans import StepPlan, StepPlans
from autosplit.trainer.trainer_options import TrainerOptions


class StepParts:
    """The parts of a rank that run its steps.

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
        self._device = device
        self._recorder = recorder_on(groups.rank, device)
        self.dataflow = StageDataflow(stages.count, stages.wiring)
        self._grad_dtype = grad_dtype = options.stages.split.grad_dtype
        self.memory = RankMemory(model, groups, self.dataflow, device, store, grad_dtype)
        self.limits = options.limits(len(schedule.ranks))
        audit = options.run.audit
        self.auditor = Auditor(groups, device, goes_on=audit == "mark") if audit else None
        self._shares_tensors = groups.layout.tensor_ranks > 1
        source = schedule.placement[self.dataflow.first_from_batch]
        self._seeds = StageSeeds(groups, device, schedule.stages, source)
        self._scales = options.run.scales
        self.losses = LossGradients(groups, schedule, device, options.run.scaler)
        self._last = schedule.stages - 1
        stages_here, wiring = schedule.stages_on(groups.rank), stages.wiring
        self._splitter = BatchSplitter(
            schedule.microbatches,
            device,
            inputs=self.dataflow.from_batch(stages_here),
            targets=self._last in stages_here,
            names=() if wiring is None else wiring.names,
            flattens=wiring is not None,
        )
        self._completed = completed = CompletedModules(
            model.modules, loss_fn, self._last, wiring is not None, options, groups, device
        )
        self._evaluation_stages = EvaluationStages(
            completed, self._last, model, groups, self.dataflow, self._seeds
        )
        self._rank_stages = rank_stages = RankStages(
            stages,
            completed,
            schedule,
            options,
            factory,
            model,
            groups,
            self.dataflow,
            self._seeds,
            device,
        )
        self.flight = self._flight_recorder(options, shared)
        self._executors = StepExecutors(
            schedule,
            options,
            model,
            groups,
            self.dataflow,
            self.memory,
            rank_stages,
            self._seeds,
            device,
            store,
            self.flight,
        )
        self._plans = StepPlans(
            self._splitter,
            self._seeds,
            groups,
            self.dataflow,
            model.modules,
            microbatches=schedule.microbatches,
            source=source,
            is_known=self._is_known,
            check=self._executors.check_steps,
            equal_counts=model.sharded.frees_after_actions,
        )
        self._grad_tensors: Mapping[BatchSlot, Sequence[Tensor]] = {}
        self.stages: Mapping[int, TrainableStage] = MappingProxyType({})
        self.last_step: StepPlan | None = None
        self.spans: list[Span] = []
        self._hooked: list[Tensor] = []  # parameters whose hooks wait for the end of the actions

    def _flight_recorder(
        self, options: TrainerOptions, shared: Sequence[Sequence[Holder]]
    ) -> FlightRecorder | None:
        """The flight recorder, if the options have one."""
        if options.run.recorder is None:
            return None
        return FlightRecorder(
            options.run.recorder,
            self._model.modules,
            shared,
            self._groups,
            self._guard,
            self._seeds,
            self._device,
            scales=self._scales,
        )

    @property
    def schedule(self) -> Schedule:
        """The schedule of training; ``"auto"`` replaces it after the measured steps."""
        return self._executors.current_schedule

    @property
    def settled(self) -> bool:
        """Whether the schedule is final: no more steps are measured to find a better one."""
        return self._executors.tuner is None

    def _is_known(self, plan: StepPlan) -> bool:
        """Whether this rank knows, without a message, that all stages can run a plan's
        microbatches.
        """
        if plan.evaluates:
            return self._evaluation_stages.is_known(plan)
        return self._rank_stages.has_graphs(plan)
