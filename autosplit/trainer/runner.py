"""Runs the batches of a trainer through its schedule, on one rank.

    batch            the rank's own inputs and targets
      |
    StepPlan         the stages and the executor for its shape, agreed on by all ranks
      |
    microbatches     views of the batch along dimension 0
      |
    Executor.run     the rank's row of F, I and W; then gradients are reduced over copies and shards
      |
    StepReduction    one all-reduce of losses and norm, which ends the step

Each rank numbers its plans by bits, the same plan by the same bit on all ranks. If every rank has
seen the signature of its batch, one bit mask reduced with AND names the plan. Otherwise ranks
exchange the shapes and dtypes of their batches, and all look up or add the same plan.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.device import generators_kept
from autosplit.errors import CaptureError, PipelineError, PlanError
from autosplit.pipeline.engine.autocast import WithAutocast
from autosplit.pipeline.engine.boundaries import Boundaries, TensorMeta
from autosplit.pipeline.engine.evaluation import ModuleStage, forward_only
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.moves import Moves
from autosplit.pipeline.engine.offload_target import OffloadTarget
from autosplit.pipeline.engine.stage_builder import (
    build_stages,
    check_inputs,
    check_loss,
    compile_stages,
    traced,
)
from autosplit.pipeline.engine.stage_protocols import ForwardStage, StageFactory, TrainableStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds, draw_number
from autosplit.pipeline.engine.timing import recorder_on
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.moves import has_moves
from autosplit.pipeline.schedule.routes import StageDataflow, pairs_of, routes_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.playing import recv_posting_order
from autosplit.pipeline.simulation.simulate import Span, window_of
from autosplit.ranks.first_error import Guard
from autosplit.ranks.groups import Groups
from autosplit.stage import Stage
from autosplit.torch_internals.autograd import call_accumulate_hooks
from autosplit.trainer.agreement import StepReduction
from autosplit.trainer.batches import (
    Batch,
    BatchSlot,
    BatchSplitter,
    Metas,
    Microbatches,
    agree_on_batch,
    check_static,
    compare_contents,
    deliver_gradients,
    signature,
    summary_of,
)
from autosplit.trainer.gradient_norms import GradientNorms
from autosplit.trainer.options import MEMORY, TrainerOptions
from autosplit.trainer.rank_memory import RankMemory
from autosplit.trainer.rank_model import RankModel
from autosplit.trainer.stage_modules import (
    LossFunction,
    Observer,
    StageSource,
    WithLoss,
    check_trained,
    explain_failed_capture,
)
from autosplit.trainer.tuning import Tuner

_LOG = logging.getLogger(__name__)
_MAX_PLANS = 63  # the bits of an int64 that is not negative


@dataclass
class StepPlan:
    """The stages and the executor for batches of one shape on this rank.

    Attributes:
        metas: shapes and dtypes of the batch's tensors, by path.
        evaluates: whether the step is an evaluation, which only runs forwards.
        grad_slots: the tensors of the batch that need a gradient, on any rank.
        boundaries: shapes and dtypes of the tensors between stages.
        dtype: the dtype of the losses; valid once the first such batch has run.
        stages: this rank's stages, in training; empty until the first such batch.
        executor: runs them; None until the first such batch.
    """

    metas: Metas
    evaluates: bool
    grad_slots: frozenset[BatchSlot] = frozenset()
    boundaries: Boundaries = field(default_factory=Boundaries)
    dtype: torch.dtype = torch.float32
    stages: Mapping[int, TrainableStage] = field(default_factory=dict)
    executor: Executor | None = None


class Runner:
    """Runs batches on this rank: forward and backward in training, only forward in evaluation.

    The caller holds the trainer's guard during each call.

    Args:
        stages: the source of all stages of the model.
        loss_fn: the loss, which runs at the end of the last stage.
        schedule: the schedule of the first training step.
        options: the trainer's options.
        model: this rank's modules and parameters; stages are built from them at the first batch.
        groups: the trainer's process groups.
        guard: the trainer's guard.
        device: the device of the stages.
        store: the store that this rank offloads to, if any.

    Attributes:
        schedule: the schedule of training; ``"auto"`` replaces it after the measured steps.
        stages: this rank's stages of the last training step; empty before the first.
        spans: the recorded actions of that step.
        memory: this rank's memory, predicted and recorded.
        record: whether to record ``spans``, and with ``"memory"`` also memory. Steps that
            ``"auto"`` measures always record ``spans``.
        clips: whether to compute the norm of the gradient.
    """

    def __init__(
        self,
        stages: StageSource,
        loss_fn: LossFunction,
        schedule: Schedule,
        options: TrainerOptions,
        model: RankModel,
        groups: Groups,
        guard: Guard,
        device: torch.device,
        store: OffloadTarget | None,
    ) -> None:
        self._loss_fn, self._autocast = loss_fn, options.stages.autocast
        self.record, self.clips = options.run.record, options.max_grad_norm is not None
        self._nonfinite = options.run.nonfinite
        self._model, self._groups, self._guard = model, groups, guard
        self._device, self._store = device, store
        self._recorder = recorder_on(groups.rank, device)
        self._dataflow = StageDataflow(stages.count, stages.wiring)
        # Buffers of modules that stages on different ranks share.
        self._shared_buffers = [
            holder
            for holders in stages.shared_buffers
            if len({schedule.placement[stage] for stage, _ in holders}) > 1
            for holder in holders
        ]
        grad_dtype = options.stages.grad_dtype
        self.memory = RankMemory(model, groups, self._dataflow, device, store, grad_dtype)
        self._tuner: Tuner | None = None
        if options.tunes:
            self._tuner = Tuner(schedule, groups, self._dataflow, self.memory, options.memory_limit)
        self.schedule = schedule
        self._factory: StageFactory = options.factory(cut=stages.cut)
        self._shares_tensors = groups.layout.tensor_ranks > 1
        # A whole model is cut for one shape, and predicted memory holds for one.
        self._static = stages.cut or options.memory_limit is not None
        self._source = schedule.placement[self._dataflow.first_from_batch]
        self._seeds = StageSeeds(groups, device, schedule, self._source)
        self._last = self.schedule.stages - 1
        self._forwards = forward_only(self.schedule)
        stages_here, wiring = schedule.stages_on(groups.rank), stages.wiring
        self._splitter = BatchSplitter(
            schedule.microbatches,
            device,
            inputs=self._dataflow.from_batch(stages_here),
            targets=self._last in stages_here,
            names=() if wiring is None else wiring.names,
        )
        self._plans: dict[int, StepPlan] = {}  # by bit, the least recently used first
        # By signature, the bits of the plans that may run such a batch: other ranks decide between
        # them, as this rank may see only a part of the batch.
        self._plan_bits: dict[Hashable, int] = {}
        self._observer: Observer | None = None
        self._completed: dict[tuple[bool, int | None], dict[int, nn.Module]] = {}
        self._split_stages: dict[nn.Module, Stage] = {}
        self._grad_tensors: Mapping[BatchSlot, Tensor] = {}
        self.stages: Mapping[int, TrainableStage] = MappingProxyType({})
        self.spans: list[Span] = []
        self._contents_compared = self._limited = False

    @property
    def settled(self) -> bool:
        """Whether the schedule is final: no more steps are measured to find a better one."""
        return self._tuner is None

    def train(self, batch: Batch | None, *, waits: bool = True) -> StepReduction:
        """Run the schedule and add its gradients to the parameters' ``.grad``.

        Args:
            batch: see ``PipelineTrainer.step``.
            waits: whether to wait for the other ranks first, so that a batch that one rank
                refuses runs on none.

        Returns:
            Losses and norm, being reduced over all ranks.
        """
        plan, executor, inputs, targets = self._prepare_batch(batch, waits=waits)
        self._grad_tensors = self._splitter.requiring_grad(batch) if plan.grad_slots else {}
        self._batch_gradients = executor.batch_gradients
        model, memory, microbatches = self._model, self.memory, inputs + targets
        recorder = self._recorder if self.record or self._tuner is not None else None
        memory.recorder = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._seeds.restoring())
            if self.record == MEMORY:
                tensors = _tensors(microbatches)
                recorder = stack.enter_context(memory.recording(plan, tensors, self._recorder))
            if model.reduces:
                stack.enter_context(model.reducing_gradients())
            for call in model.pre_step:
                call()
            losses = executor.run(inputs, targets, recorder)
            if memory.recorder is not None:
                memory.recorder.finish(losses.values())
            hooked: list[Tensor] = []
            for split_stage in traced(self.stages).values():
                split_stage.waiting_hooks = hooked
            for stage in self.stages.values():
                stage.publish()
        call_accumulate_hooks(hooked)
        needs_norms = self.clips or self._nonfinite != "ignore"
        norms = model.gradient_norms(squares=self.clips) if needs_norms else None
        for call in model.post_step:
            call()
        self.spans = recorder.spans() if recorder is not None else []
        self._tune()
        return self._start_reduction(plan, losses, microbatches, norms)

    def _tune(self) -> None:
        """Pass the step's measurements to the tuner, and use the schedule that it decides on."""
        if self._tuner is None:
            return
        schedule = self._tuner.after_step(self.spans, self.stages)
        if schedule is not None:
            self._tuner = None
            self._change_schedule(schedule)

    def backward_batch(self) -> None:
        """Run backward from the tensors of the last batch that need a gradient."""
        count, shares = self.schedule.microbatches, self._groups.layout.shares
        tensors, self._grad_tensors = self._grad_tensors, {}
        with self._guard.during("the backward of the batch's own tensors"):
            deliver_gradients(tensors, self._batch_gradients, count, shares)

    def predict(self, batch: Batch | None) -> RankMemory:
        """Predict this rank's memory in a step with a batch, without running it.

        Builds the stages and chooses the schedule, as the step would do.
        """
        plan, _, inputs, targets = self._prepare_batch(batch)
        self.memory.recorder = None
        self.memory.set_step(plan, _tensors(inputs + targets))
        return self.memory

    def _prepare_batch(
        self, batch: Batch | None, *, waits: bool = True
    ) -> tuple[StepPlan, Executor, Microbatches, Microbatches]:
        """Return the plan and the executor of a training step, its inputs and its targets."""
        self._model.check()
        plan, inputs, targets = self._agree_on_plan(batch, evaluates=False, waits=waits)
        executor = plan.executor or self._build(plan, batch, inputs, targets)
        self.stages, self.memory.step = plan.stages, plan
        if self._tuner is not None and self._tuner.memory_limit is not None and not self._limited:
            self._limited = True
            self.memory.set_step(plan, _tensors(inputs + targets))
            self._change_schedule(self._tuner.search_schedule(self.stages))
            executor = plan.executor or executor
        return plan, executor, inputs, targets

    def _build(
        self, plan: StepPlan, batch: Batch | None, inputs: Microbatches, targets: Microbatches
    ) -> Executor:
        """Build the stages and the executor of a training step from its first batch."""
        activity = self._groups.activity
        with activity.during("building its stages", announced=True):
            plan.stages, plan.boundaries = build_stages(
                self._complete(batch),
                self.schedule.stages,
                self._dataflow,
                self._groups,
                self._stage_for,
                inputs=_examples(plan, "inputs", inputs),
                targets=_examples(plan, "targets", targets),
                device=self._device,
            )
        with activity.during("compiling its stages", announced=True):
            compile_stages(plan.stages, self.schedule)
        plan.dtype = plan.boundaries.outputs[self._last][0].dtype
        stages = plan.stages.values()
        draws = any(not isinstance(s, Stage) or s.functions.draws for s in stages)
        # This also starts the step's clock on all ranks together, replicas included.
        if self._groups.everybody.all_reduce_and(0 if draws else -1) == [0]:
            self._seeds.expect_draws()
        return self._build_executor(plan, self.schedule, plan.stages)

    def _build_executor(
        self, plan: StepPlan, schedule: Schedule, stages: Mapping[int, ForwardStage]
    ) -> Executor:
        """Build a plan's executor, which runs stages by a schedule; collective over all ranks."""
        groups = self._groups
        groups.connect(pairs_of(schedule, self._dataflow))
        routes = routes_of(schedule, self._dataflow)[groups.rank]
        posts = recv_posting_order(schedule, self._dataflow)[groups.rank]
        moves = None
        if has_moves(schedule):
            moves = Moves(stages, schedule, groups, self._device, self._store)
        loss_grad = None
        if stages is plan.stages:
            scale = 1.0 / schedule.microbatches
            loss_grad = torch.full((), scale, dtype=plan.dtype, device=self._device)
        plan.executor = Executor(
            stages,
            schedule,
            groups.rank,
            Transport(routes, groups, plan.boundaries, device=self._device, posts=posts),
            loss_grad=loss_grad,
            activity=groups.activity,
            moves=moves,
            batch_arguments=self._batch_arguments(plan),
            seeds=self._seeds,
        )
        return plan.executor

    def _batch_arguments(self, plan: StepPlan) -> dict[int, dict[int, BatchSlot]]:
        """Return the arguments of stages that need a gradient and come from the batch.

        By stage of this rank, then by the argument's place among the stage's arguments.
        """
        arguments: dict[int, dict[int, BatchSlot]] = {stage: {} for stage in self._model.modules}
        targets = sum(path.startswith("targets") for path in plan.metas)
        for name, number in plan.grad_slots:
            for stage, slots in arguments.items():
                if name == "inputs":
                    places = self._dataflow.batch_places(stage, number)
                else:  # targets are the last arguments
                    places = [number - targets] if stage == self._last else []
                slots |= dict.fromkeys(places, (name, number))
        return arguments

    def _stage_for(self, module: nn.Module, args: list[Tensor], *, index: int) -> TrainableStage:
        """Return a stage that runs ``module(*args)``.

        The module's earlier stage is used again if it accepts the arguments: its graphs may be
        valid for these sizes, too.
        """
        stage = self._split_stages.get(module)
        with self._model.sharded.gathered(index):
            if stage is not None and stage.accepts(args):
                stage.prepare(args)
                return stage
            try:
                with generators_kept():
                    new_stage = self._factory(module, args, index=index)
            except CaptureError:
                # The module is not called to explain the error if it has collectives: the ranks
                # that share its tensors would have to call it, too.
                explain_failed_capture(index, module, args, called=not self._shares_tensors)
                raise
        if isinstance(new_stage, Stage):
            self._check_buffers(index, module, new_stage)
            new_stage.seed = partial(self._seeds.seed, index)
            self._split_stages[module] = new_stage
        return new_stage

    def _check_buffers(self, index: int, module: nn.Module, stage: Stage) -> None:
        """Refuse a forward that writes into a buffer of which another rank has a copy.

        The copies would come to differ, as each rank writes only its own.

        Raises:
            PipelineError: names the buffer.
        """
        bare = self._model.modules[index]
        shared = {
            id(bare.get_buffer(name)): name for at, name in self._shared_buffers if at == index
        }
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if id(buffer) in shared and name in stage.functions.updated_state:
                raise PipelineError(
                    f"stage {index} writes into its buffer {shared[id(buffer)]!r}, which belongs "
                    "to a module that a stage of another rank has, too, and the two would differ: "
                    "give each stage its own module, or place both stages on one rank"
                )

    def _complete(self, batch: Batch | None, *, evaluates: bool = False) -> dict[int, nn.Module]:
        """Return this rank's modules by stage, with autocast, and the loss in the last stage's.

        The batch says whether the loss takes one target or a tuple, and of how many.
        """
        targets = None if batch is None else batch[1]
        count = None if isinstance(targets, Tensor) else len(targets or ())
        key = evaluates, count
        if key not in self._completed:
            modules, last = dict(self._model.modules), self._last
            if last in modules:
                check_trained(self._loss_fn, modules[last])
                observer = self._observe if evaluates else None
                modules[last] = WithLoss(modules[last], self._loss_fn, count, observer)
            dtype = self._autocast
            if dtype is not None:
                modules = {
                    stage: WithAutocast(module, self._device, dtype)
                    for stage, module in modules.items()
                }
            self._completed[key] = modules
        return self._completed[key]

    def _observe(self, output: Any, targets: Any) -> None:
        """Pass the arguments of the loss, in evaluation, to the observer of this call, if any."""
        if self._observer is not None:
            self._observer(output, targets)

    def evaluate(self, batch: Batch | None, observer: Observer | None = None) -> StepReduction:
        """Run only forwards, on the modules themselves and without graphs.

        Args:
            batch: see ``PipelineTrainer.step``.
            observer: is called with the arguments of the loss, on the rank that computes it.

        Returns:
            Losses, being reduced over all ranks.
        """
        plan, inputs, targets = self._agree_on_plan(batch, evaluates=True)
        is_first = plan.executor is None
        executor = plan.executor or self._build_evaluation(plan, batch)
        for call in self._model.pre_step:
            call()
        self._observer = observer
        with self._seeds.restoring():
            losses = executor.run(inputs, targets)
        self._observer = None
        for call in self._model.post_step:
            call()
        if is_first:
            for loss in losses.values():
                check_loss([TensorMeta(loss.shape, loss.dtype, True)])
            loss_dtype = next((loss.dtype for loss in losses.values()), None)
            rows = self._groups.everybody.gather((loss_dtype, self._seeds.drew))
            plan.dtype = next(dtype for dtype, _ in rows if dtype is not None)
            if any(drew for _, drew in rows) and self._seeds.expect_draws():
                draw_number()
        return self._start_reduction(plan, losses, inputs + targets)

    def _build_evaluation(self, plan: StepPlan, batch: Batch | None) -> Executor:
        """Build the executor of an evaluation, which calls the modules themselves."""
        stages = {
            index: ModuleStage(module, index, self._dataflow.shared_places(index))
            for index, module in self._complete(batch, evaluates=True).items()
        }
        return self._build_executor(plan, self._forwards, stages)

    def _agree_on_plan(
        self, batch: Batch | None, *, evaluates: bool, waits: bool = True
    ) -> tuple[StepPlan, Microbatches, Microbatches]:
        """Return the step plan that all ranks agreed on, and the inputs and targets, cut.

        If any rank refuses the batch, nothing has changed.
        """
        key = evaluates, signature(batch)
        fitting = self._plan_bits.get(key, 0)
        common, *numbers = self._common_plans(fitting, evaluates=evaluates, waits=waits)
        self._seeds.begin(*numbers, evaluates=evaluates)
        if common:
            bit = common & -common
            if not fitting & bit:  # only if the other ranks have not waited
                self._splitter.check(batch)
                raise PipelineError(
                    "this rank has a batch of another shape than the other ranks, which already "
                    "run the step, as step_async() does not wait: pass the same batch on every "
                    "rank"
                )
            inputs, targets = self._splitter.split(batch)
        else:
            bit, inputs, targets = self._agree_on_new_shape(batch, evaluates=evaluates)
            self._plan_bits[key] = self._plan_bits.get(key, 0) | bit
        plan = self._plans[bit] = self._plans.pop(bit)  # now the most recently used
        return plan, inputs, targets

    def _common_plans(self, fitting: int, *, evaluates: bool, waits: bool) -> list[int]:
        """Return the bits of the plans that fit on all ranks, and the numbers for ``StageSeeds``.

        The bits are 0 if a rank has not seen its batch's signature. Without ``waits``, the rank of
        the first stage that uses an input of the batch decides alone.
        """
        groups, numbers = self._groups, (fitting, *self._seeds.offer(evaluates=evaluates))
        if waits or len(groups.layout.pipelines) > 1:
            return groups.everybody.all_reduce_and(*numbers)
        return groups.broadcast(numbers, self._source)

    def _agree_on_new_shape(
        self, batch: Batch | None, *, evaluates: bool
    ) -> tuple[int, Microbatches, Microbatches]:
        """Find or add the plan for a batch whose signature is new to some rank; collective.

        Returns:
            The plan's bit, the inputs and the targets.

        Raises:
            BatchError: a rank refuses the batch.
        """
        refusal, tensors, grad_slots = "", dict[str, Tensor](), dict[BatchSlot, Tensor]()
        inputs: Microbatches = []
        targets: Microbatches = []
        try:
            tensors = self._splitter.check(batch)
            if not evaluates:
                grad_slots = self._splitter.requiring_grad(batch)
            inputs, targets = self._splitter.split(batch)
            check_inputs(self._model.modules, self._dataflow, inputs[0] if inputs else ())
        except (PipelineError, PlanError) as error:
            refusal = str(error)
        metas, slots = agree_on_batch(refusal, tensors, grad_slots, self._groups)
        if not self._contents_compared:
            compare_contents(tensors, self._groups)
            self._contents_compared = True
        for bit, plan in self._plans.items():
            if plan.evaluates != evaluates:
                continue
            if (metas, slots) == (plan.metas, plan.grad_slots):
                return bit, inputs, targets
            if self._static:
                check_static(metas, plan.metas)
        bit = self._free_bit()
        self._plans[bit] = StepPlan(metas, evaluates, slots)
        return bit, inputs, targets

    def _free_bit(self) -> int:
        """Return a bit without a plan; if all have one, drop the least recently used plan.

        All ranks drop the same plan, as all have used their plans in the same order.
        """
        free = next((1 << n for n in range(_MAX_PLANS) if 1 << n not in self._plans), 0)
        if not free:
            free = next(iter(self._plans))
            del self._plans[free]
            remaining = ((key, bits & ~free) for key, bits in self._plan_bits.items())
            self._plan_bits = {key: bits for key, bits in remaining if bits}
        return free

    def _change_schedule(self, schedule: Schedule) -> None:
        """Use another schedule from the next step on; collective over all ranks."""
        _LOG.info("the schedule from the next step on: %r", schedule)
        self.schedule = schedule
        for plan in self._plans.values():
            if plan.executor is not None and not plan.evaluates:
                compile_stages(plan.stages, schedule)
                self._build_executor(plan, schedule, plan.stages)

    def _start_reduction(
        self,
        plan: StepPlan,
        losses: Mapping[int, Tensor],
        batch: Microbatches,
        norms: GradientNorms | None = None,
    ) -> StepReduction:
        """Start the all-reduce of losses, gradient norms and the batch's checksum."""
        nonfinite = None
        if norms is not None and self._nonfinite != "ignore":
            nonfinite = self._model.nonfinite_stage(norms)
        return StepReduction(
            self._groups,
            self._guard,
            losses,
            count=self.schedule.microbatches,
            end=self.schedule.placement[self._last],
            squares=norms.squares() if norms is not None and self.clips else None,
            nonfinite=nonfinite,
            raises=self._nonfinite == "raise",
            window=window_of(() if plan.evaluates else self.spans),
            batch=summary_of(_tensors(batch)) if self._shares_tensors else 0,
            dtype=plan.dtype,
        )


def _examples(plan: StepPlan, name: str, part: Microbatches) -> list[Any]:
    """Return the tensors of a part's first microbatch, with ``requires_grad`` as in the plan."""
    return [
        None
        if tensor is None
        else tensor.detach().requires_grad_((name, number) in plan.grad_slots)
        for number, tensor in enumerate(part[0] if part else ())
    ]


def _tensors(batch: Microbatches) -> list[Tensor | None]:
    return [tensor for microbatch in batch for tensor in microbatch]
