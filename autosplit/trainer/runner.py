"""Runs one batch after another through the schedule of a trainer, on one rank."""

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
from autosplit.pipeline.engine.executor import Executor, ForwardStage
from autosplit.pipeline.engine.host_store import HostStore
from autosplit.pipeline.engine.moves import Moves
from autosplit.pipeline.engine.stage_seeds import StageSeeds, draw_number
from autosplit.pipeline.engine.stages import (
    ModuleStage,
    StageFactory,
    TrainableStage,
    build_stages,
    check_inputs,
    check_loss,
    compile_stages,
    forward_only,
    traced,
)
from autosplit.pipeline.engine.timing import recorder_on
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.moves import has_moves
from autosplit.pipeline.schedule.routes import Feeds, pairs_of, routes_of
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
    explain,
)
from autosplit.trainer.tuning import Tuner

_LOG = logging.getLogger(__name__)
_KEPT = 63  # shapes of batches, used last: as many as an integer has bits


@dataclass
class StepPlan:
    """What runs batches of one shape on this rank.

    Attributes:
        metas: what they are.
        evaluates: whether it only runs forward.
        grad_slots: which of it needs a gradient, on any rank.
        boundaries: the shapes between stages.
        dtype: of the losses, once one has run.
        stages: those of the rank, in training; empty until the first such batch.
        executor: runs them; None until then.
    """

    metas: Metas
    evaluates: bool
    grad_slots: frozenset[BatchSlot] = frozenset()
    boundaries: Boundaries = field(default_factory=Boundaries)
    dtype: torch.dtype = torch.float32
    stages: Mapping[int, TrainableStage] = field(default_factory=dict)
    executor: Executor | None = None


class Runner:
    """This rank's runs: forward and backward in training, forward only in evaluation.

    Whoever calls it guards the call.

    Args:
        stages: all stages.
        loss_fn: what the last one ends with.
        schedule: what training runs at first.
        options: how.
        model: what this rank holds; its stages are built of it when the first batch is there.
        groups: the trainer's process groups.
        guard: the trainer's guard.
        device: where the stages run.
        store: where this rank offloads, if it does.

    Attributes:
        schedule: what training runs; under ``"auto"`` another one behind the measured steps.
        stages: this rank's stages of the last run in training; empty before the first.
        spans: what that run recorded.
        memory: tells this rank's bytes, and how fast its store is.
        record: whether to record ``spans``, as steps that ``"auto"`` measures always are, and
            ``memory``.
        clips: whether the norm of the gradient is asked for.
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
        store: HostStore | None,
    ) -> None:
        self._loss_fn, self._autocast = loss_fn, options.stages.autocast
        self.record, self.clips = options.run.record, options.max_grad_norm is not None
        self._nonfinite = options.run.nonfinite
        self._model, self._groups, self._guard = model, groups, guard
        self._device, self._store = device, store
        self._recorder = recorder_on(groups.rank, device)
        self._feeds = Feeds(stages.count, stages.wiring)
        self._buffers_apart = [
            holder
            for holders in stages.shared_buffers
            if len({schedule.placement[stage] for stage, _ in holders}) > 1
            for holder in holders
        ]
        sums = options.stages.grad_dtype
        self.memory = RankMemory(model, groups, self._feeds, device, store, sums)
        self._tuner: Tuner | None = None
        if options.tunes:
            self._tuner = Tuner(schedule, groups, self._feeds, self.memory, options.memory_limit)
        self.schedule = schedule
        self._factory: StageFactory = options.factory(cut=stages.cut)
        self._shares_tensors = groups.layout.tensor_ranks > 1
        # A whole model is cut for one shape; of another, what is held differs.
        self._static = stages.cut or options.memory_limit is not None
        self._source = schedule.placement[self._feeds.first_from_batch]
        self._seeds = StageSeeds(groups, device, schedule, self._source)
        self._last = self.schedule.stages - 1
        self._forwards = forward_only(self.schedule)
        own, wiring = schedule.held(groups.rank), stages.wiring
        self._split = BatchSplitter(
            schedule.microbatches,
            device,
            inputs=self._feeds.from_batch(own),
            targets=self._last in own,
            names=() if wiring is None else wiring.names,
        )
        self._steps: dict[int, StepPlan] = {}  # by bit, in the order in which they were used
        self._fitting: dict[Hashable, int] = {}  # the bits of those that may run such a batch
        self._observer: Observer | None = None
        self._faces: dict[tuple[bool, int | None], dict[int, nn.Module]] = {}
        self._known: dict[nn.Module, Stage] = {}
        self._grad_tensors: Mapping[BatchSlot, Tensor] = {}
        self.stages: Mapping[int, TrainableStage] = MappingProxyType({})
        self.spans: list[Span] = []
        self._contents_compared = self._limited = False

    @property
    def settled(self) -> bool:
        """Whether no more steps are measured for another schedule."""
        return self._tuner is None

    def train(self, batch: Batch | None, *, waits: bool = True) -> StepReduction:
        """Run the schedule and add its gradients to the parameters' ``.grad``.

        Args:
            batch: see ``PipelineTrainer.step``.
            waits: whether it begins on all ranks or on none.

        Returns:
            Losses and norm on their way.
        """
        step, executor, inputs, targets = self._ready(batch, waits=waits)
        self._grad_tensors = self._split.requiring_grad(batch) if step.grad_slots else {}
        self._batch_gradients = executor.batch_gradients
        model, memory, microbatches = self._model, self.memory, inputs + targets
        recorder = self._recorder if self.record or self._tuner is not None else None
        memory.recorder = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._seeds.restoring())
            if self.record == MEMORY:
                tensors = _tensors(microbatches)
                recorder = stack.enter_context(memory.recording(step, tensors, self._recorder))
            if model.reduces:
                stack.enter_context(model.reduced())
            for call in model.pre_step:
                call()
            losses = executor.run(inputs, targets, recorder)
            if memory.recorder is not None:
                memory.recorder.finish(losses.values())
            hooked: list[Tensor] = []
            for each in traced(self.stages).values():
                each.waiting_hooks = hooked
            for stage in self.stages.values():
                stage.publish()
        call_accumulate_hooks(hooked)
        looks = self.clips or self._nonfinite != "ignore"
        norms = model.norms(squares=self.clips) if looks else None
        for call in model.post_step:
            call()
        self.spans = recorder.spans() if recorder is not None else []
        if self._tuner is not None:
            found = self._tuner.after_step(self.spans, self.stages)
            if found is not None:
                self._tuner = None
                self._adopt(found)
        return self._agree(step, losses, microbatches, norms)

    def backward_batch(self) -> None:
        """Give the tensors of the last batch that need a gradient theirs."""
        count, shares = self.schedule.microbatches, self._groups.layout.shares
        tensors, self._grad_tensors = self._grad_tensors, {}
        with self._guard("the backward of what made the batch"):
            deliver_gradients(tensors, self._batch_gradients, count, shares)

    def predict(self, batch: Batch | None) -> RankMemory:
        """Knows what a step will hold on this rank; its stages are built and its schedule chosen,
        as for that step, but nothing is run.
        """
        step, _, inputs, targets = self._ready(batch)
        self.memory.recorder = None
        self.memory.know(step, _tensors(inputs + targets))
        return self.memory

    def _ready(
        self, batch: Batch | None, *, waits: bool = True
    ) -> tuple[StepPlan, Executor, Microbatches, Microbatches]:
        """A batch cut into microbatches, with what is to run it in training."""
        self._model.check()
        step, inputs, targets = self._take(batch, evaluates=False, waits=waits)
        executor = step.executor or self._build(step, batch, inputs, targets)
        self.stages, self.memory.step = step.stages, step
        if self._tuner is not None and self._tuner.limit is not None and not self._limited:
            self._limited = True
            self.memory.know(step, _tensors(inputs + targets))
            self._adopt(self._tuner.found(self.stages))
            executor = step.executor or executor
        return step, executor, inputs, targets

    def _build(
        self, step: StepPlan, batch: Batch | None, inputs: Microbatches, targets: Microbatches
    ) -> Executor:
        """Build the stages of a training step from its first batch, whole and cut."""
        place = self._groups.place
        with place("building its stages"):
            step.stages, step.boundaries = build_stages(
                self._complete(batch),
                self.schedule.stages,
                self._feeds,
                self._groups,
                self._stage,
                inputs=_examples(step, "inputs", inputs),
                targets=_examples(step, "targets", targets),
                device=self._device,
            )
        with place("compiling its stages"):
            compile_stages(step.stages, self.schedule)
        step.dtype = step.boundaries.known[self._last][0].dtype
        stages = step.stages.values()
        draws = any(not isinstance(s, Stage) or s.functions.draws for s in stages)
        # A step's clock starts for all ranks together, of replicas of the pipeline too.
        if self._groups.everybody.common_bits(0 if draws else -1) == [0]:
            self._seeds.expect_draws()
        return self._prepare(step, self.schedule, step.stages)

    def _prepare(
        self, step: StepPlan, schedule: Schedule, stages: Mapping[int, ForwardStage]
    ) -> Executor:
        """Have a schedule run a step's stages; collective over all ranks."""
        groups = self._groups
        groups.connect(pairs_of(schedule, self._feeds))
        routes = routes_of(schedule, self._feeds)[groups.rank]
        posts = recv_posting_order(schedule, self._feeds)[groups.rank]
        moves = None
        if has_moves(schedule):
            moves = Moves(stages, schedule, groups, self._device, self._store)
        loss_grad = None
        if stages is step.stages:
            scale = 1.0 / schedule.microbatches
            loss_grad = torch.full((), scale, dtype=step.dtype, device=self._device)
        step.executor = Executor(
            stages,
            schedule,
            groups.rank,
            Transport(routes, groups, step.boundaries, device=self._device, posts=posts),
            loss_grad=loss_grad,
            place=groups.place,
            moves=moves,
            batch_arguments=self._batch_arguments(step),
            seeds=self._seeds,
        )
        return step.executor

    def _batch_arguments(self, step: StepPlan) -> dict[int, dict[int, BatchSlot]]:
        """Of this rank's stages the arguments from the batch that need a gradient, by place."""
        arguments: dict[int, dict[int, BatchSlot]] = {stage: {} for stage in self._model.modules}
        targets = sum(path.startswith("targets") for path in step.metas)
        for name, number in step.grad_slots:
            for stage, slots in arguments.items():
                if name == "inputs":
                    places = self._feeds.batch_places(stage, number)
                else:  # they come last
                    places = [number - targets] if stage == self._last else []
                slots |= dict.fromkeys(places, (name, number))
        return arguments

    def _stage(self, module: nn.Module, args: list[Tensor], *, index: int) -> TrainableStage:
        """A stage for ``module(*args)``: that of another step where it can take them, whose graphs
        may hold for these sizes, too.
        """
        known = self._known.get(module)
        with self._model.sharded.gathered(index):
            if known is not None and known.takes(args):
                known.prepare(args)
                return known
            try:
                with generators_kept():
                    made = self._factory(module, args, index=index)
            except CaptureError:
                # Other ranks that share its tensors would have to call it, too.
                explain(index, module, args, called=not self._shares_tensors)
                raise
        if isinstance(made, Stage):
            self._check_buffers(index, module, made)
            made.seed = partial(self._seeds.seed, index)
            self._known[module] = made
        return made

    def _check_buffers(self, index: int, module: nn.Module, made: Stage) -> None:
        """Refuse a forward that writes into a buffer of a module that another rank has, too: each
        would go on with its own.
        """
        own = self._model.modules[index]
        apart = {id(own.get_buffer(name)): name for at, name in self._buffers_apart if at == index}
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if id(buffer) in apart and name in made.functions.updated_state:
                raise PipelineError(
                    f"stage {index} writes into its buffer {apart[id(buffer)]!r}, which is of a "
                    "module that a stage of another rank has, too, and would differ there: let "
                    "each stage have a module of its own, or both be on one rank"
                )

    def _complete(self, batch: Batch | None, *, evaluates: bool = False) -> dict[int, nn.Module]:
        """This rank's modules with the loss on the last stage, autocast on all; the first batch is
        an example: it tells whether the loss takes a tensor or a tuple.
        """
        targets = None if batch is None else batch[1]
        count = None if isinstance(targets, Tensor) else len(targets or ())
        face = evaluates, count
        if face not in self._faces:
            whole, last = dict(self._model.modules), self._last
            if last in whole:
                check_trained(self._loss_fn, whole[last])
                observer = self._observe if evaluates else None
                whole[last] = WithLoss(whole[last], self._loss_fn, count, observer)
            dtype = self._autocast
            if dtype is not None:
                whole = {at: WithAutocast(each, self._device, dtype) for at, each in whole.items()}
            self._faces[face] = whole
        return self._faces[face]

    def _observe(self, output: Any, targets: Any) -> None:
        """What the loss is given in evaluation, to whoever asks."""
        if self._observer is not None:
            self._observer(output, targets)

    def evaluate(self, batch: Batch | None, observer: Observer | None = None) -> StepReduction:
        """Run the forwards only, on the modules as they are; the losses on their way.

        Args:
            batch: see ``PipelineTrainer.step``.
            observer: is shown what the loss is given, where that is computed.
        """
        step, inputs, targets = self._take(batch, evaluates=True)
        known = step.executor
        executor = known or self._build_evaluation(step, batch)
        for call in self._model.pre_step:
            call()
        self._observer = observer
        with self._seeds.restoring():
            losses = executor.run(inputs, targets)
        self._observer = None
        for call in self._model.post_step:
            call()
        if known is None:
            for each in losses.values():
                check_loss([TensorMeta(each.shape, each.dtype, True)])
            own = next((each.dtype for each in losses.values()), None)
            rows = self._groups.everybody.gather((own, self._seeds.drew))
            step.dtype = next(dtype for dtype, _ in rows if dtype is not None)
            if any(drew for _, drew in rows) and self._seeds.expect_draws():
                draw_number()
        return self._agree(step, losses, inputs + targets)

    def _build_evaluation(self, step: StepPlan, batch: Batch | None) -> Executor:
        """Have a step evaluate the modules themselves."""
        stages = {
            index: ModuleStage(module, index, self._feeds.shared_places(index))
            for index, module in self._complete(batch, evaluates=True).items()
        }
        return self._prepare(step, self._forwards, stages)

    def _take(
        self, batch: Batch | None, *, evaluates: bool, waits: bool = True
    ) -> tuple[StepPlan, Microbatches, Microbatches]:
        """What runs a batch, on all ranks the same, and the batch cut; where a rank refuses it, all
        is as it was.
        """
        key = evaluates, signature(batch)
        own = self._fitting.get(key, 0)
        common, *numbers = self._common(own, evaluates=evaluates, waits=waits)
        self._seeds.begin(*numbers, evaluates=evaluates)
        if common:
            bit = common & -common
            if not own & bit:  # others have not waited
                self._split.given(batch)
                raise PipelineError(
                    "this rank was given a batch of another shape than the others, which run a "
                    "step that does not wait: give every rank the same batch"
                )
            inputs, targets = self._split(batch)
        else:
            bit, inputs, targets = self._introduce(batch, evaluates=evaluates)
            self._fitting[key] = self._fitting.get(key, 0) | bit
        step = self._steps[bit] = self._steps.pop(bit)  # used last
        return step, inputs, targets

    def _common(self, own: int, *, evaluates: bool, waits: bool) -> list[int]:
        """Which steps may run a batch on all ranks; 0 where one has yet to know it; and what
        ``StageSeeds`` takes for the step. Without waiting for others, as the rank of the first
        stage that takes an input of the batch says.
        """
        groups, numbers = self._groups, (own, *self._seeds.offer(evaluates=evaluates))
        if waits or len(groups.layout.pipelines) > 1:
            return groups.everybody.common_bits(*numbers)
        return groups.announce(numbers, self._source)

    def _introduce(
        self, batch: Batch | None, *, evaluates: bool
    ) -> tuple[int, Microbatches, Microbatches]:
        """Find or make the step for a batch whose shape is new to some rank: its bit, and the batch
        cut; collective.

        Raises:
            BatchError: a rank refuses the batch.
        """
        refused, given, grad_slots = "", dict[str, Tensor](), dict[BatchSlot, Tensor]()
        inputs: Microbatches = []
        targets: Microbatches = []
        try:
            given = self._split.given(batch)
            if not evaluates:
                grad_slots = self._split.requiring_grad(batch)
            inputs, targets = self._split(batch)
            check_inputs(self._model.modules, self._feeds, inputs[0] if inputs else ())
        except (PipelineError, PlanError) as error:
            refused = str(error)
        agreed, slots = agree_on_batch(refused, given, grad_slots, self._groups)
        if not self._contents_compared:
            compare_contents(given, self._groups)
            self._contents_compared = True
        steps = {bit: each for bit, each in self._steps.items() if each.evaluates == evaluates}
        for bit, step in steps.items():
            if (agreed, slots) == (step.metas, step.grad_slots):
                return bit, inputs, targets
            if self._static:
                check_static(agreed, step.metas)
        free = next((1 << n for n in range(_KEPT) if 1 << n not in self._steps), 0)
        if not free:  # all ranks drop the same
            free = next(iter(self._steps))
            del self._steps[free]
            left = ((key, bits & ~free) for key, bits in self._fitting.items())
            self._fitting = {key: bits for key, bits in left if bits}
        self._steps[free] = StepPlan(agreed, evaluates, slots)
        return free, inputs, targets

    def _adopt(self, schedule: Schedule) -> None:
        """Train under another schedule from now on."""
        _LOG.info("from the next step on: %r", schedule)
        self.schedule = schedule
        for step in self._steps.values():
            if step.executor is not None and not step.evaluates:
                compile_stages(step.stages, schedule)
                self._prepare(step, schedule, step.stages)

    def _agree(
        self,
        step: StepPlan,
        losses: Mapping[int, Tensor],
        batch: Microbatches,
        norms: GradientNorms | None = None,
    ) -> StepReduction:
        """Start to make losses and gradient norms known to all, and what this rank took."""
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
            window=window_of(() if step.evaluates else self.spans),
            batch=summary_of(_tensors(batch)) if self._shares_tensors else 0,
            dtype=step.dtype,
        )


def _examples(step: StepPlan, name: str, part: Microbatches) -> list[Any]:
    """The tensors of the first microbatch; those that need a gradient say so."""
    tensors = enumerate(part[0] if part else ())
    return [
        None if tensor is None else tensor.detach().requires_grad_((name, at) in step.grad_slots)
        for at, tensor in tensors
    ]


def _tensors(batch: Microbatches) -> list[Tensor | None]:
    return [each for part in batch for each in part]
