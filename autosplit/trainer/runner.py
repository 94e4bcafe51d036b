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

``StepPlans`` agrees on the plan, and ``StepExecutors`` builds its stages and its executor.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from autosplit.device import generators_kept
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.partial_stage import AutogradStage
from autosplit.pipeline.engine.stage_factory import traced
from autosplit.pipeline.engine.timing import SpanRecorder
from autosplit.pipeline.simulation.simulate import window_of
from autosplit.torch_internals.autograd import call_accumulate_hooks
from autosplit.trainer.agreement import StepReduction
from autosplit.trainer.auditing import Auditor
from autosplit.trainer.aux_losses import aux_sums, start_aux_losses
from autosplit.trainer.batch_agreement import summary_of
from autosplit.trainer.batches import (
    Batch,
    Microbatches,
    MicrobatchList,
    deliver_gradients,
    tensors_of,
)
from autosplit.trainer.loss_gradients import (
    StepWeights,
    Weight,
    step_weights,
)
from autosplit.trainer.options import MEMORY
from autosplit.trainer.rank_memory import RankMemory
from autosplit.trainer.stage_modules import Observer
from autosplit.trainer.step_parts import StepParts
from autosplit.trainer.step_plans import StepPlan
from autosplit.trainer.trained_parameters import GradientNorms
from autosplit.trainer.verification import Gradients, Verification, differences, gradients_of

_NOTHING = nullcontext()
"""In place of what a step does not do."""


class Runner(StepParts):
    """Runs batches on this rank: forward and backward in training, only forward in evaluation.

    The trainer calls each method inside of its guard, which reports errors to all ranks.
    """

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
        self._hooked.clear()
        executors, trained = self._executors, self._model.trained
        audits = self.auditor if executors.tuner is None else None
        recording = self._start_recording(plan, executor, audits, inputs, targets)
        with self._seeds, recording as recorder, self._reducing(plan):
            losses = executor.run(inputs, targets, plan.boundaries, recorder, loss_grads)
            if recorder is not None and self.memory.recorder is not None:
                self.memory.recorder.finish(itertools.chain(*losses.values()))
            for stage in plan.stages.values():
                stage.publish()
        if self._hooked:
            call_accumulate_hooks(self._hooked)
        needs_norms = self.clips or self._checks_finite
        norms = trained.gradient_norms(squares=self.clips) if needs_norms else None
        for call in self._model.post_step:
            call()
        self.spans = recorder.spans() if recorder is not None else []
        self.last_step = plan
        if not plan.functions and len({*plan.microbatches}) == 1:
            graphs = traced(plan.stages)
            if len(graphs) == len(plan.stages):
                plan.functions = [stage.functions for stage in graphs.values()]
        if executors.tuner is not None:
            executors.tune(self.spans, plan, self._plans.of_training())
        if audits is not None:
            audits.measure_step(self.spans, executor.schedule, self.stages)
        checks: Sequence[float] = ()
        flight = self.flight
        if flight is not None:
            checked = None if self.clips and not trained.counts_all else norms
            are_finite = checked is not None and not checked.nonfinite()
            checks = flight.end_actions(self.spans, are_finite=are_finite)
        microbatches = inputs + targets
        reduction = self._start_reduction(plan, losses, microbatches, weights, norms, checks)
        if flight is not None:
            flight.checks_of_ranks = reduction.checks
        return reduction

    def _start_recording(
        self,
        plan: StepPlan,
        executor: Executor,
        audits: Auditor | None,
        inputs: Microbatches,
        targets: Microbatches,
    ) -> AbstractContextManager[SpanRecorder | None]:
        """Begin a step of the flight recorder, of audits and of the memory's record, if any.

        Returns:
            A context for the step's actions, whose value records their times; None without a
            record.
        """
        memory, flight = self.memory, self.flight
        memory.recorder = None
        if audits is not None:
            audits.arrange_audits(executor, self.stages)
        is_tuned = self._executors.tuner is not None
        measures = is_tuned or (audits is not None and audits.period is None)
        if not (self.record or measures) and flight is None:
            return _NOTHING
        tensors = tensors_of(inputs + targets)
        if flight is not None:
            reduces = self._model.reduces or self._scales
            flight.start_step(executor, self.stages, tensors, self._recorder, reduces=reduces)
        if self.record == MEMORY:
            memory.set_step(plan, self._executors.largest_of(plan, inputs, targets))
            return memory.recording(plan, tensors, self._recorder)
        return nullcontext(self._recorder)

    def _reducing(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Context around the actions of a step. At its end it reduces the gradients in ``.grad``
        over copies.
        """
        model, scale = self._model, self.losses.scale
        if plan.aux:
            mean_count = sum(plan.pipeline_counts) / len(plan.pipeline_counts)
            start_aux_losses(plan.aux, scale / mean_count)
        if model.reduces or self._scales:
            return model.reducing_gradients(scale)
        return _NOTHING

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
        self.memory.set_step(plan, self._executors.largest_of(plan, inputs, targets))
        return self.memory

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
        executor, executors = plan.executor, self._executors
        if executor is None:
            executor = executors.build_training(plan, batch, inputs, targets)
            part_names = plan.boundaries[0].part_names
            plan.loss_grads = self.losses.of_step(plan.dtype, part_names, plan.pipeline_counts)
        self.stages, self.memory.step = plan.stages, plan
        if executors.current is not executor:
            executors.set_current(plan, executor)
            _collect_hooks(plan.stages, self._hooked)
        return plan, executor, inputs, targets

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
                modules = self._completed.complete(batch).items()
                stages = {at: AutogradStage(m, at, self._grad_dtype) for at, m in modules}
            other = self._executors.build_reference(plan, executor, stages)
            _collect_hooks(stages, [])
            executor.set_audits((), ())
            for run in (other, executor):
                model.report_gradients(traced(run.stages), run.schedule)
                with self._seeds, model.preserving_state():
                    with self._reducing(plan):
                        run.run(inputs, targets, plan.boundaries, None, loss_grads)
                        for stage in run.stages.values():
                            stage.publish()
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
            stages = self._evaluation_stages.of_plan(plan, batch)
            executor = self._executors.build_forwards(plan, stages)
        self._completed.observer = observer
        if plan.aux:
            start_aux_losses(plan.aux, 0.0)
        with self._seeds:
            losses = executor.run(inputs, targets, plan.boundaries)
        self._completed.observer = None
        for call in self._model.post_step:
            call()
        if plan.listed:
            self._evaluation_stages.refuse_misfits(plan)
        self._evaluation_stages.set_loss(plan, losses)
        return self._start_reduction(plan, losses, inputs + targets, weights)

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
        tensors = tensors_of(batch) if self._shares_tensors else []
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
            end=plan.schedule.placement[self._last],
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


def _collect_hooks(stages: Mapping[int, Any], hooked: list[Tensor]) -> None:
    """Let stages add parameters to a list when they publish gradients, instead of calling hooks."""
    for stage in stages.values():
        if hasattr(stage, "waiting_hooks"):
            stage.waiting_hooks = hooked
