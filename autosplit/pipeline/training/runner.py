"""Runs one batch after another through the schedule of a trainer, on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from autosplit.errors import BatchError, PipelineError
from autosplit.mesh.costs import Link
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.first_error import Guard
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.host_store import HostStore
from autosplit.pipeline.engine.mode import Mode, Modes
from autosplit.pipeline.engine.results import Agreement
from autosplit.pipeline.engine.shapes import Batch, Microbatches
from autosplit.pipeline.engine.stages import (
    SplitStage,
    StageFactory,
    TrainableStage,
    forward_only,
)
from autosplit.pipeline.engine.timing import Recorder, recorder_on
from autosplit.pipeline.ledger.call_memory import CallMemory
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.timeline import Span
from autosplit.pipeline.simulation.transfer import MoveCosts
from autosplit.pipeline.training.agreement.batch_agreement import agree_on_batch
from autosplit.pipeline.training.agreement.batch_contents import compare_contents, summary_of
from autosplit.pipeline.training.memory.limited_schedule import LimitTuner
from autosplit.pipeline.training.memory.rank_ledger import MEMORY, RankLedger, Record
from autosplit.pipeline.training.memory.rank_prediction import RankPrediction
from autosplit.pipeline.training.memory.rank_size import RankSize
from autosplit.pipeline.training.replicas.gradient_completion import completion_of, publish_part
from autosplit.pipeline.training.replicas.model_replicas import Completion
from autosplit.pipeline.training.replicas.reduction_slices import (
    SlicedByReductions,
    slices_by_stage,
)
from autosplit.pipeline.training.state.rank_state import RankState
from autosplit.pipeline.training.state.snapshot import ForwardState
from autosplit.torch_internals.allocations import countable
from autosplit.torch_internals.state import distinct_storage_bytes

from .auto_schedule import Tuner
from .metrics import MetricFunction
from .optimizer_step import OptimizerStep
from .options import TrainerOptions
from .stage_builder import StageBuilder
from .training_setup import TrainingSetup
from .tuning import tuner_for

_Reduced = Callable[[], contextlib.AbstractContextManager[None]]


class _Ready(NamedTuple):
    mode: Mode
    executor: Executor
    inputs: Microbatches
    targets: Microbatches


class Runner:
    """This rank's runs: forward and backward in training, forward only in evaluation.

    Whoever calls it guards the call.

    Args:
        setup: what there is to run.
        options: how.
        held: what this rank holds; its stages are built of it when the first batch is there.
        groups: the trainer's process groups.
        guard: the trainer's guard.
        update: the optimizer's steps, which tell whether weights were right.
        device: where the stages run.
        settled: waits until the device has done what it was given.
        store: where this rank offloads, if it does.

    Attributes:
        schedule: what training runs; under ``"auto"`` another one behind the measured steps.
        stages: this rank's stages of the last run in training; empty before the first.
        spans: what that run recorded.
        ledger: what this rank held in that run; None where that was not recorded.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        options: TrainerOptions,
        held: RankState,
        groups: Groups,
        guard: Guard,
        update: OptimizerStep,
        device: torch.device,
        settled: Callable[[], None],
        store: HostStore | None = None,
    ) -> None:
        self._held = held
        self._settled = settled
        self._store = store
        self._recorder = recorder_on(groups.rank, device)
        self._calls = CallMemory(device)
        self._groups = groups
        self._guard = guard
        self._update = update
        self._device = device
        self._feeds = Feeds(setup.stages.count, setup.stages.wiring)
        self._size = RankSize(held, groups, update, self._feeds, self._calls, store)
        self._tuner = tuner_for(
            setup, options, groups, self._feeds, self._size, held.replicas, device
        )
        first = setup.schedule if self._tuner is None else self._tuner.measured
        self.schedule: Schedule = held.replicas.reducing_early(first)
        source = self.schedule.placement[self._feeds.first_from_batch]
        make = partial(self._make_mode, "train", self.schedule)
        # A whole model is cut for one shape; of another, what is held differs.
        static = setup.stages.cut or options.memory_limit is not None
        self._train = Modes(static, groups, source, make)
        make = partial(self._make_mode, "evaluate", forward_only(self.schedule))
        self._evaluate = Modes(static, groups, source, make)
        self._builder = StageBuilder(
            held.modules,
            self.schedule,
            self._feeds,
            setup.loss_fn,
            self._factory(setup, options),
            autocast=options.autocast,
            device=device,
            sharded=held.sharded,
        )
        self.stages: Mapping[int, TrainableStage] = MappingProxyType({})
        self.spans: list[Span] = []
        self.ledger: RankLedger | None = None
        self._parts: Mapping[tuple[int, int], Completion] = MappingProxyType({})
        self._contents_compared = False
        self._limited = False

    @property
    def settled(self) -> bool:
        """Whether no more steps are measured for another schedule."""
        return self._tuner is None

    def _factory(self, setup: TrainingSetup, options: TrainerOptions) -> StageFactory:
        """That of the options; with slices for what is reduced early."""
        factory, replicas = setup.factory, self._held.replicas
        early = replicas.reduces and replicas.reduces_early and self._device.type == "cpu"
        if not early or not options.cuts_weights or not isinstance(factory, SplitStage):
            return factory
        counts = slices_by_stage(self.schedule, self._groups.rank, replicas.reductions_by_stage)
        return SlicedByReductions(factory, counts)

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
        parts = _tensors(inputs, targets)
        recorder: Recorder | None = self._recorder if record or self._tuner is not None else None
        ledger = None
        weighs = isinstance(self._tuner, LimitTuner) and countable(self._device)
        if record == MEMORY or weighs:
            ledger = RankLedger(
                mode,
                self._held,
                self._update.state,
                parts,
                self._recorder,
                self._device,
                RankPrediction(mode, parts, self._calls),
            )
            recorder = ledger.recorder

        def run() -> dict[int, Tensor]:
            with self._held.steady():
                losses = executor.run(inputs, targets, recorder)
            if ledger is not None:
                ledger.finish(losses.values())
            return losses

        self._parts = {each: self._completion(*each) for each in executor.completions}
        timed = recorder is not None and self._device.type == "cpu"
        reduced = partial(self._held.reduced, tuple(self._parts.values()), timed=timed)
        with contextlib.nullcontext() if ledger is None else ledger.recording():
            if self._update.expects_more:
                losses = self._run_again(run, reduced)
            else:
                losses = self._run_once(run, reduced)
        self._settled()
        self._held.sharded.free_all()
        self._held.replicas.equalise_buffers()
        if recorder is not None:
            recorder.note(self._held.replicas.spans)
        self.spans = recorder.spans() if recorder is not None else []
        self.ledger = ledger if record == MEMORY else None
        self._size.ledger = ledger
        self._size.times = None if mode.moves is None else mode.moves.times
        self._size.send_seconds = mode.messages.send_seconds
        if self._tuner is not None:
            self._tune(self._tuner)
        return self._agree(mode, losses, parts, clipping=clipping)

    def _completion(self, stage: int, part: int) -> Completion:
        """What is complete with a slice of W; names are for replicas, which are rarely there."""
        if not self._held.replicas.reduces:
            return stage, ()
        return completion_of(stage, part, self.stages[stage], self._held.modules[stage])

    def predict(self, batch: Batch | None) -> tuple[RankPrediction, int]:
        """What a step will hold on this rank, and the bytes of its fixed owners; its stages are
        built and its schedule chosen, as for that step, but nothing is run.
        """
        mode, _, inputs, targets = self._ready(batch)
        prediction = RankPrediction(mode, _tensors(inputs, targets), self._calls)
        return prediction, self._size.fixed_bytes() - self._size.batch_bytes

    def store_costs(self) -> tuple[Link, MoveCosts]:
        """The links to ranks' stores, and what moves take of ranks; collective."""
        return self._size.host_link(), self._size.move_costs()

    def _ready(self, batch: Batch | None, *, waits: bool = True) -> _Ready:
        """A batch cut into microbatches, with what is to run it in training."""
        self._held.check()
        mode, inputs, targets = self._take(self._train, batch, waits=waits)
        executor = mode.executor or self._builder.train(mode, batch, inputs, targets)
        self.stages = self._size.stages = mode.stages
        self._size.boundaries = mode.negotiation.learn
        if isinstance(self._tuner, LimitTuner) and not self._limited:
            self._limited = True
            self._size.batch_bytes = distinct_storage_bytes(_tensors(inputs, targets))
            self._adopt(self._tuner.before_step(self.stages))
            executor = mode.executor or executor
        return _Ready(mode, executor, inputs, targets)

    def measure(
        self, batch: Batch | None, metric_fn: MetricFunction
    ) -> tuple[Agreement, dict[int, dict[str, float]]]:
        """``evaluate``, with what the metric finds in the microbatches whose losses are here."""
        with self._builder.observer.finding(metric_fn) as found:
            agreement = self.evaluate(batch)
        last = self.schedule.stages - 1
        own = [
            microbatch
            for microbatch in range(self.schedule.microbatches)
            if self.schedule.home(last, microbatch) == self._groups.rank
        ]
        return agreement, dict(zip(own, found, strict=True))

    def evaluate(self, batch: Batch | None) -> Agreement:
        """Run the forwards only, on the modules as they are; the losses on their way."""
        mode, inputs, targets = self._take(self._evaluate, batch)
        executor = mode.executor or self._builder.evaluate(mode, batch)
        with self._held.steady():
            losses = executor.run(inputs, targets)
        self._settled()
        self._held.sharded.free_all()
        self._held.replicas.equalise_buffers()
        mode.announce_loss(losses)
        return self._agree(mode, losses, _tensors(inputs, targets), clipping=False)

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

    def _run_once(
        self, run: Callable[[], dict[int, Tensor]], reduced: _Reduced
    ) -> dict[int, Tensor]:
        with reduced():
            losses = run()
            self._publish()
        return losses

    def _run_again(
        self, run: Callable[[], dict[int, Tensor]], reduced: _Reduced
    ) -> dict[int, Tensor]:
        """Run behind an optimizer step that may have been wrong, and again if it was."""
        before = ForwardState(self._held.modules.values(), self._device)
        losses = run()
        if self._update.confirm():
            self._discard()
            before.restore()
            losses = run()
        with reduced():
            self._publish()
        return losses

    def _publish(self) -> None:
        for stage in self.stages.values():
            stage.publish()

    def _finished(self, stage: int, part: int) -> None:
        """What follows the last weight gradients of a slice, of a stage that others hold too."""
        if self._held.reducing:
            last = publish_part(self.stages[stage], part)
            self._held.complete(self._parts[stage, part], last=last)

    def _discard(self) -> None:
        """Forget the gradients of a run, which was on wrong weights."""
        before = [p.grad for p in self._held.parameters]
        self._publish()
        self._held.sharded.forget()
        for parameter, gradient in zip(self._held.parameters, before, strict=True):
            parameter.grad = gradient

    def _make_mode(self, name: str, schedule: Schedule, shape: str) -> Mode:
        # Sums beside other messages have run over Gloo only.
        several = schedule.mirror is not None or self._held.replicas.reduces_early
        early = several and self._device.type == "cpu"
        return Mode(
            f"{name} {shape}",
            schedule,
            self._feeds,
            self._groups,
            self._guard.check,
            self._device,
            finished=self._finished if early else None,
            store=self._store,
            shards=self._held.sharded,
        )

    def _tune(self, tuner: Tuner) -> None:
        """Measure one of the first steps, and change the schedule where that says so."""
        found = tuner.after_step(self.spans, self.stages)
        if tuner.done:
            self._tuner = self._size.ledger = None
        if found is not None:
            self._adopt(found)

    def _adopt(self, schedule: Schedule) -> None:
        """Train under another schedule from now on."""
        self.schedule = schedule
        make = partial(self._make_mode, "train", schedule)
        self._train.reschedule(schedule, make)

    def _agree(
        self,
        mode: Mode,
        losses: Mapping[int, Tensor],
        batch: Sequence[Tensor | None],
        *,
        clipping: bool,
    ) -> Agreement:
        """Start to make losses and gradient norm known to all, and what this rank took."""
        shares_tensors = self._groups.layout.tensor_ranks > 1
        squares = self._held.squares() if clipping else None
        return Agreement(
            self._groups,
            self._guard,
            losses,
            count=self.schedule.microbatches,
            squares=squares,
            batch=summary_of(batch) if shares_tensors else 0,
            dtype=mode.loss_dtype,
        )


def _tensors(inputs: Microbatches, targets: Microbatches) -> list[Tensor | None]:
    return [each for part in (*inputs, *targets) for each in part]
