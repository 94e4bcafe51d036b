"""Runs one batch after another through the schedule of a trainer, on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.errors import BatchError, PipelineError
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.first_error import Guard
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.host_store import HostStore
from autosplit.pipeline.engine.mode import Mode, Modes
from autosplit.pipeline.engine.results import Agreement
from autosplit.pipeline.engine.shapes import Batch, Microbatches
from autosplit.pipeline.engine.stages import (
    ModuleStage,
    SplitStage,
    StageFactory,
    TrainableStage,
    build_stages,
    forward_only,
)
from autosplit.pipeline.engine.timing import measure_transfer, recorder_on
from autosplit.pipeline.schedule.routes import pairs_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.timeline import Span
from autosplit.stage import Stage
from autosplit.torch_internals.allocations import countable

from .agreement import agree_on_batch, compare_contents, summary_of
from .auto_schedule import Tuner
from .memory_limit import LimitTuner
from .options import MEMORY, Record, TrainerOptions
from .rank_memory import RankMemory
from .rank_state import RankState
from .replicas import Completion, completion_of, publish_part
from .stage_modules import (
    LossFunction,
    MetricFunction,
    StageSource,
    WithAutocast,
    WithLoss,
    check_trained,
    numbers,
)


class Runner:
    """This rank's runs: forward and backward in training, forward only in evaluation.

    Whoever calls it guards the call.

    Args:
        stages: all stages.
        loss_fn: what the last one ends with.
        schedule: what training runs at first.
        options: how.
        held: what this rank holds; its stages are built of it when the first batch is there.
        groups: the trainer's process groups.
        guard: the trainer's guard.
        device: where the stages run.
        store: where this rank offloads, if it does.

    Attributes:
        schedule: what training runs; under ``"auto"`` another one behind the measured steps.
        stages: this rank's stages of the last run in training; empty before the first.
        spans: what that run recorded.
        memory: tells this rank's bytes, and how fast its store is.
    """

    def __init__(
        self,
        stages: StageSource,
        loss_fn: LossFunction,
        schedule: Schedule,
        options: TrainerOptions,
        held: RankState,
        groups: Groups,
        guard: Guard,
        device: torch.device,
        store: HostStore | None,
    ) -> None:
        self._loss_fn, self._autocast = loss_fn, options.stages.autocast
        self._held, self._groups, self._guard = held, groups, guard
        self._device, self._store = device, store
        self._recorder = recorder_on(groups.rank, device)
        self._feeds = Feeds(stages.count, stages.wiring)
        self.memory = RankMemory(held, groups, device, store)
        self._tuner = self._tuner_for(schedule, options)
        first = schedule if self._tuner is None else self._tuner.measured
        replicas = held.replicas
        self.schedule = first if replicas is None else replicas.reducing_early(first)
        # Sums beside other messages have run over Gloo only.
        on_cpu = device.type == "cpu"
        reduces = on_cpu and replicas is not None and replicas.reduces_early
        self._early = on_cpu and (schedule.mirror is not None or reduces)
        self._factory: StageFactory = options.factory(cut=stages.cut)
        whole = options.tunes or options.joins_weights  # what depends on whole Ws
        if reduces and not whole and replicas and isinstance(self._factory, SplitStage):
            self._factory = replicas.sliced(self._factory, self.schedule)
        self._shares_tensors = groups.layout.tensor_ranks > 1
        # A whole model is cut for one shape; of another, what is held differs.
        static = stages.cut or options.memory_limit is not None
        source = self.schedule.placement[self._feeds.first_from_batch]
        make = partial(self._make_mode, "train", self.schedule)
        self._train = Modes(static, groups, source, make)
        make = partial(self._make_mode, "evaluate", forward_only(self.schedule))
        self._evaluate = Modes(static, groups, source, make)
        self._metric: MetricFunction | None = None
        self._found: list[dict[str, float]] = []
        self._faces: dict[bool, dict[int, nn.Module]] = {}
        self._known: dict[int, Stage] = {}
        self.stages: Mapping[int, TrainableStage] = MappingProxyType({})
        self.spans: list[Span] = []
        self._parts: dict[tuple[int, int], Completion] = {}
        self._contents_compared = self._limited = False

    @property
    def settled(self) -> bool:
        """Whether no more steps are measured for another schedule."""
        return self._tuner is None

    def _tuner_for(self, schedule: Schedule, options: TrainerOptions) -> Tuner | None:
        """That of ``schedule="auto"`` or ``memory_limit=``; None where the schedule stays."""
        if not options.tunes:
            return None
        groups, replicas = self._groups, self._held.replicas
        known: dict[str, Any] = {
            "links": partial(
                measure_transfer, groups, self._device, pairs_of(schedule, self._feeds)
            ),
            "wiring": self._feeds.wiring,
            "reductions": (lambda: None) if replicas is None else replicas.measured,
        }
        if options.memory_limit is None:
            return Tuner(schedule, groups, **known)
        limit = options.memory_limit
        return LimitTuner(schedule, groups, limit=limit, size=self.memory, **known)

    def train(
        self, batch: Batch | None, *, clipping: bool, record: Record, waits: bool
    ) -> Agreement:
        """Run the schedule and add its gradients to the parameters' ``.grad``.

        Args:
            batch: see ``PipelineTrainer.step``.
            clipping: whether the norm of the gradient will be asked for.
            record: whether to record ``spans``, as steps that ``"auto"`` measures always are, and
                ``memory``.
            waits: whether it begins on all ranks or on none.

        Returns:
            Losses and norm on their way.
        """
        mode, executor, inputs, targets = self._ready(batch, waits=waits)
        held, memory, tensors = self._held, self.memory, _tensors(inputs + targets)
        weighs = isinstance(self._tuner, LimitTuner) and countable(self._device)
        recorder = self._recorder if record or self._tuner is not None else None
        memory.recorder = None
        with contextlib.ExitStack() as stack:
            if record == MEMORY or weighs:
                recorder = stack.enter_context(memory.recording(mode, tensors, self._recorder))
            if held.reduces:
                self._parts = {each: self._completion(*each) for each in executor.completions}
                timed = recorder is not None and self._device.type == "cpu"
                stack.enter_context(held.reduced(tuple(self._parts.values()), timed=timed))
            if held.twice is not None:
                stack.enter_context(held.twice.steady())
            losses = executor.run(inputs, targets, recorder)
            if memory.recorder is not None:
                memory.recorder.finish(losses.values())
            for stage in self.stages.values():
                stage.publish()
        for call in held.behind:
            call()
        if recorder is not None and held.replicas is not None:
            recorder.note(held.replicas.spans)
        self.spans = recorder.spans() if recorder is not None else []
        if self._tuner is not None:
            self._tune(self._tuner)
        return self._agree(mode, losses, tensors, clipping=clipping)

    def _completion(self, stage: int, part: int) -> Completion:
        """What is complete with a slice of W; names are for replicas, which are rarely there."""
        if self._held.replicas is None:
            return stage, ()
        return completion_of(stage, part, self.stages[stage], self._held.modules[stage])

    def predict(self, batch: Batch | None) -> RankMemory:
        """Knows what a step will hold on this rank; its stages are built and its schedule chosen,
        as for that step, but nothing is run.
        """
        mode, _, inputs, targets = self._ready(batch)
        self.memory.recorder = None
        self.memory.know(mode, _tensors(inputs + targets))
        return self.memory

    def _ready(
        self, batch: Batch | None, *, waits: bool = True
    ) -> tuple[Mode, Executor, Microbatches, Microbatches]:
        """A batch cut into microbatches, with what is to run it in training."""
        self._held.check()
        mode, inputs, targets = self._take(self._train, batch, waits=waits)
        executor = mode.executor or self._build(mode, batch, inputs, targets)
        self.stages, self.memory.mode = mode.stages, mode
        if isinstance(self._tuner, LimitTuner) and not self._limited:
            self._limited = True
            self.memory.know(mode, _tensors(inputs + targets))
            self._adopt(self._tuner.before_step(self.stages))
            executor = mode.executor or executor
        return mode, executor, inputs, targets

    def _build(
        self, mode: Mode, batch: Batch | None, inputs: Microbatches, targets: Microbatches
    ) -> Executor:
        """Build the stages of a training mode from its first batch, whole and cut."""
        with mode.place("building its stages"):
            mode.stages = build_stages(
                self._complete(batch),
                self.schedule.stages,
                self._feeds,
                mode.negotiation,
                self._stage,
                inputs=inputs[0] if inputs else (),
                targets=targets[0] if targets else (),
                device=self._device,
            )
        mode.compile()
        scale = 1.0 / self.schedule.microbatches
        loss_grad = torch.full((), scale, dtype=mode.loss_dtype, device=self._device)
        return mode.prepare(mode.stages, loss_grad)

    def _stage(self, module: nn.Module, args: list[Tensor], *, index: int) -> TrainableStage:
        """A stage for ``module(*args)``: that of another mode where it can take them, whose graphs
        may hold for these sizes, too.
        """
        known, sharded = self._known.get(index), self._held.sharded
        with contextlib.nullcontext() if sharded is None else sharded.gathered(index):
            if known is not None and known.takes(args):
                known.prepare(args)
                return known
            made = self._factory(module, args, index=index)
        if isinstance(made, Stage):
            self._known[index] = made
        return made

    def _complete(self, batch: Batch | None, *, evaluates: bool = False) -> dict[int, nn.Module]:
        """This rank's modules with the loss on the last stage, autocast on all; the first batch is
        an example: it tells whether the loss takes a tensor or a tuple.
        """
        if evaluates not in self._faces:
            whole, last = dict(self._held.modules), self.schedule.stages - 1
            if last in whole:
                check_trained(self._loss_fn, whole[last])
                targets = None if batch is None else batch[1]
                count = None if isinstance(targets, Tensor) else len(targets or ())
                observer = self._observe if evaluates else None
                whole[last] = WithLoss(whole[last], self._loss_fn, count, observer)
            dtype = self._autocast
            if dtype is not None:
                whole = {at: WithAutocast(each, self._device, dtype) for at, each in whole.items()}
            self._faces[evaluates] = whole
        return self._faces[evaluates]

    def _observe(self, output: Any, targets: Any) -> None:
        """What the loss is given in evaluation, while there is a metric."""
        if self._metric is not None:
            self._found.append(numbers(self._metric(output, targets)))

    def measure(
        self, batch: Batch | None, metric_fn: MetricFunction
    ) -> tuple[Agreement, dict[int, dict[str, float]]]:
        """``evaluate``, with what the metric finds in the microbatches whose losses are here."""
        self._metric, self._found = metric_fn, []
        try:
            agreement = self.evaluate(batch)
        finally:
            self._metric = None
        last = self.schedule.stages - 1
        own = [
            microbatch
            for microbatch in range(self.schedule.microbatches)
            if self.schedule.home(last, microbatch) == self._groups.rank
        ]
        return agreement, dict(zip(own, self._found, strict=True))

    def evaluate(self, batch: Batch | None) -> Agreement:
        """Run the forwards only, on the modules as they are; the losses on their way."""
        mode, inputs, targets = self._take(self._evaluate, batch)
        executor = mode.executor or self._build_evaluation(mode, batch)
        twice = self._held.twice
        with contextlib.nullcontext() if twice is None else twice.steady():
            losses = executor.run(inputs, targets)
        for call in self._held.behind:
            call()
        mode.announce_loss(losses)
        return self._agree(mode, losses, _tensors(inputs + targets), clipping=False)

    def _build_evaluation(self, mode: Mode, batch: Batch | None) -> Executor:
        """Put the modules themselves into an evaluating mode."""
        sharded = self._held.sharded
        stages = {
            index: ModuleStage(
                module,
                index,
                self._feeds.shared_places(index),
                *(() if sharded is None else (partial(sharded.gather, index),)),
            )
            for index, module in self._complete(batch, evaluates=True).items()
        }
        return mode.prepare(stages)

    def _take(
        self, modes: Modes, batch: Batch | None, *, waits: bool = True
    ) -> tuple[Mode, Microbatches, Microbatches]:
        """What runs a batch, and the batch cut; where a rank refuses it, all is as it was."""
        mode = modes.of(batch)
        parts: tuple[Microbatches, Microbatches] = [], []
        refused = ""
        try:
            parts = mode.split(batch)
        except PipelineError as error:
            refused = str(error)
        known = mode.executor is not None
        if refused or not known or (waits and self._groups.everybody.ranks > 1):
            try:
                agree_on_batch(refused, mode.split.offered, self._groups, known=known, waits=waits)
            except BatchError:
                modes.drop_unbuilt()
                raise
        mode.split.accept()
        if not self._contents_compared:
            compare_contents(mode.split.given(batch), self._groups)
            self._contents_compared = True
        return mode, *parts

    def _finished(self, stage: int, part: int) -> None:
        """What follows the last weight gradients of a slice, of a stage that others hold too."""
        if self._held.reducing:
            last = publish_part(self.stages[stage], part)
            self._held.complete(self._parts[stage, part], last=last)

    def _make_mode(self, name: str, schedule: Schedule, shape: str) -> Mode:
        return Mode(
            f"{name} {shape}",
            schedule,
            self._feeds,
            self._groups,
            self._guard.check,
            self._device,
            finished=self._finished if self._early else None,
            store=self._store,
            shards=self._held.sharded,
        )

    def _tune(self, tuner: Tuner) -> None:
        """Measure one of the first steps, and change the schedule where that says so."""
        found = tuner.after_step(self.spans, self.stages)
        if tuner.done:
            self._tuner = None
        if found is not None:
            self._adopt(found)

    def _adopt(self, schedule: Schedule) -> None:
        """Train under another schedule from now on."""
        self.schedule = schedule
        self._train.reschedule(schedule, partial(self._make_mode, "train", schedule))

    def _agree(
        self,
        mode: Mode,
        losses: Mapping[int, Tensor],
        batch: Sequence[Tensor | None],
        *,
        clipping: bool,
    ) -> Agreement:
        """Start to make losses and gradient norm known to all, and what this rank took."""
        return Agreement(
            self._groups,
            self._guard,
            losses,
            count=self.schedule.microbatches,
            squares=self._held.squares() if clipping else None,
            batch=summary_of(batch) if self._shares_tensors else 0,
            dtype=mode.loss_dtype,
        )


def _tensors(batch: Microbatches) -> list[Tensor | None]:
    return [each for part in batch for each in part]
