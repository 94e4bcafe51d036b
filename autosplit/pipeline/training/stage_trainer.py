"""Trains a model's stages, over any number of processes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from autosplit.errors import AutosplitError, PipelineError
from autosplit.mesh.costs import Link
from autosplit.mesh.dimensions import RankLayout
from autosplit.pipeline.engine.first_error import Board, Guard
from autosplit.pipeline.engine.groups import Groups, await_device
from autosplit.pipeline.engine.stages import SplitStage, StageFactory, TrainableStage, eval_mode
from autosplit.pipeline.engine.watch import watch_over
from autosplit.pipeline.ledger.bands import StepMemory
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.timeline import Timeline

from .agreement import Agreement, check_layout, check_unanimous, factory_options
from .batches import Batch, Inputs, Part, paired
from .metrics import StepMetrics, metrics_table
from .options import Record, TrainerOptions, check_record, choose_device, store_for
from .rank_state import OptimizerFunction, RankState
from .runner import Runner
from .shared_parameters import union_of_groups
from .stage_modules import LossFunction, MetricFunction, StageSource, by_name


class StageTrainer:
    """Trains pipeline stages over any number of processes.

    All of ``PipelineTrainer`` but cutting whole models, which needs the planner.

    Args:
        stages: the stages, none of them built yet.
        loss_fn: what the last one ends with.
        optimizer_fn: builds the optimizer of this process's parameters.
        options: how to train.
        schedule: what the stages were cut for; None builds what the options ask for.
        device: where this process's stages go, see ``PipelineTrainer``.

    Attributes:
        modules: this process's modules by stage.
        optimizer: this process's optimizer; None where it has no parameters to train.
        shared_parameters: groups of (stage, name) that are one parameter.
        device: where this process's stages are.
        mesh: as it was given; None: there is one pipeline.

    Raises:
        PipelineError: no process group, options that do not fit the stages or each other, ranks
            that were told different things, or a bad stage.
        ScheduleError: an unknown schedule, or one that is not legal.
    """

    def __init__(
        self,
        stages: StageSource,
        loss_fn: LossFunction,
        optimizer_fn: OptimizerFunction,
        options: TrainerOptions,
        schedule: Schedule | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        layout = options.layout(stages.count)
        if schedule is None:
            schedule = options.schedule_for(stages.count, len(layout.pipeline))
        factory = options.factory(cut=stages.cut)
        given = options.stages.shared_parameters
        self.shared_parameters = union_of_groups(stages.shared, given)
        check_record(options.run.record)
        self._ends: list[Callable[[], None]] = []
        self.device = choose_device(device, layout)
        self._max_norm = options.max_grad_norm
        self._norm: float | None = None
        self.mesh = options.mesh
        check_layout(layout)
        self._connect(layout, options)
        settled = partial(await_device, self.device, self._guard, options.run.timeout)
        with self._guard("building the model"):
            check_unanimous(self._said(stages, options, schedule, factory), self._groups)
            store = store_for(options, schedule, self.device)
            self._held = RankState(
                stages, self.shared_parameters, schedule, self._groups, self.device, settled
            )
            if self._held.sharded is not None and not isinstance(factory, SplitStage):
                self._held.sharded.refuse_factory(factory)
            self.modules = self._held.modules
            self._held.take_optimizer(optimizer_fn)
            self.optimizer = self._held.optimizer
            # Whoever gets here knows that every other rank did.
            everybody = self._groups.everybody
            everybody.meet()
        self._meet = everybody.meet if everybody.ranks > 1 else None
        self._runner = Runner(
            stages,
            loss_fn,
            schedule,
            options,
            self._held,
            self._groups,
            self._guard,
            self.device,
            store,
        )
        self._metrics = StepMetrics(self._runner, self.rank, self.device)

    def __repr__(self) -> str:
        """What it trains, in one line."""
        schedule, place = self.schedule, f"rank {self.rank} of {len(self.schedule.ranks)}"
        return (
            f"{type(self).__name__}({place}, stages {[*self.modules]} of {schedule.stages}, "
            f"schedule {schedule.name!r}, {schedule.microbatches} microbatches)"
        )

    def _connect(self, layout: RankLayout, options: TrainerOptions) -> None:
        """Connect the ranks, and have them watch over each other."""
        self._groups = Groups(layout, self.device, options.run.timeout)
        if options.mesh is not None and layout.inner:
            self._groups.watch_lent(options.mesh.get_group(layout.inner))
        everybody = self._groups.everybody
        board = Board(everybody.store) if everybody.ranks > 1 else None
        self._watch = watch_over(self._groups) if everybody.ranks > 1 else None
        if self._watch is not None:
            dropped = weakref.finalize(self, self._watch.leave, "dropped its trainer")
            dropped.atexit = False  # how the process ends says more
        self._guard = Guard(everybody.rank, board, self._end, self._groups.place, self._watch)

    def _said(
        self,
        stages: StageSource,
        options: TrainerOptions,
        schedule: Schedule,
        factory: StageFactory,
    ) -> dict[str, Any]:
        """What all ranks must be told alike."""
        layout = self._groups.layout
        return {
            "stages": stages.count,
            "microbatches": options.schedule.microbatches,
            "schedule": schedule,
            "memory_limit": options.memory_limit,  # first: what has one measures as "auto" does
            "schedule='auto'": options.tunes,
            "autocast": options.stages.autocast,
            "max_grad_norm": options.max_grad_norm,
            "shared_parameters": [*map(list, self.shared_parameters)],
            "wiring": stages.wiring,
            "mesh": layout.pipelines,
            **factory_options(factory, shared=layout.exchanges),
        }

    @property
    def record(self) -> Record:
        """What is recorded of each step, see ``PipelineTrainer``; may be changed between steps."""
        return self._runner.record

    @record.setter
    def record(self, record: Record) -> None:
        check_record(record)
        self._runner.record = record

    @property
    def rank(self) -> int:
        """This process's rank in its pipeline: its coordinate along "pp", if there is a mesh."""
        return self._groups.rank

    @property
    def schedule(self) -> Schedule:
        """What training runs; with ``"auto"``, another one once the first steps are measured."""
        return self._runner.schedule

    @property
    def settled(self) -> bool:
        """Whether ``schedule`` stays as it is: no steps are measured for another one."""
        return self._runner.settled

    @property
    def grad_norm(self) -> float | None:
        """The norm of the model's gradient in the last step; None without ``max_grad_norm``."""
        return self._norm

    @property
    def stages(self) -> Mapping[int, TrainableStage]:
        """This process's stages by index, those of the last step; empty before the first."""
        return self._runner.stages

    def step(
        self,
        batch: Batch | Inputs | None = None,
        target: Part | None = None,
        **named: Tensor,
    ) -> Tensor:
        """Run one training step: all microbatches, clipping, optimizer, gradients cleared.

        No optimizer moves before every rank has all its gradients. If one fails, the trainer ends
        on all ranks.

        Args:
            batch: (inputs, targets), each a tensor or a tuple of tensors with the samples along
                dimension 0, of a replica of the pipeline its own share; inputs also a dictionary,
                for a model that was cut with named ones. A rank uses the inputs that its stages
                take (in a chain, the first stage all of them), and of the targets those on the
                last stage's rank. ``()`` are no targets. With ``target``, the inputs alone.
            target: the targets, where ``batch`` is not a pair, as in torch's pipelines:
                ``step(x, target=y)``; a rank may leave out either.
            named: the inputs, of a model that was cut with named ones: ``step(input_ids=ids,
                target=y)``.

        Returns:
            The loss of each microbatch, shape [M], on the CPU, the same on every rank of the
            pipeline. The loss of the step, which the gradients belong to, is their mean, and that
            over replicas of the pipeline.

        Raises:
            BatchError: a rank refuses the batch, as it cannot be cut, its tensors have different
                numbers of samples, or ranks were given different ones. Nothing was run on any
                rank, and the next batch may do.
            PipelineError: an error on any rank, a lost peer, or a timeout.
        """
        start = perf_counter()
        with self._guard("the forward and backward"):
            agreement = self._runner.train(paired(batch, target, named))
        losses = self._hear(agreement, start)
        with self._guard("the optimizer step"):
            self._held.step(self._max_norm, self._norm, self._meet)
        self._metrics.seconds = perf_counter() - start
        return losses

    def step_async(
        self,
        batch: Batch | Inputs | None = None,
        target: Part | None = None,
        **named: Tensor,
    ) -> Agreement:
        """Run one training step without waiting for the other ranks at its end.

        A rank that is done goes on to the next step, so that one step's start fills the idle end
        of the one before; losses and weights are bit for bit those of ``step``. But an optimizer
        moves as soon as its own rank has its gradients: after a failure, ranks may have come
        one step apart, and only a checkpoint gets them together again.

        With ``max_grad_norm`` a rank waits for the norm, which the last one to have its gradients
        completes, but not for the optimizers of others.

        Args:
            batch: as for ``step``.
            target: as for ``step``.
            named: as for ``step``.

        Returns:
            The losses on their way; ``wait()`` gives what ``step`` returns.

        Raises:
            PipelineError: as for ``step``. What a rank refuses of a batch whose inputs have a shape
                that they had before is one, too: others have not waited.
        """
        self._metrics.losses = None
        with self._guard("the forward and backward"):
            agreement = self._runner.train(paired(batch, target, named), waits=False)
        with self._guard("the optimizer step"):
            if self._max_norm is not None:
                self._norm = agreement.norm()
            self._held.step(self._max_norm, self._norm)
        return agreement

    def forward_backward(
        self,
        batch: Batch | Inputs | None = None,
        target: Part | None = None,
        **named: Tensor,
    ) -> Tensor:
        """Run the schedule and add the gradients of the mean loss to the parameters' ``.grad``.

        Arguments, result and errors are those of ``step``. Returns only once all ranks are done.
        """
        start = perf_counter()
        with self._guard("the forward and backward"):
            agreement = self._runner.train(paired(batch, target, named))
        return self._hear(agreement, start)

    def _hear(self, agreement: Agreement, start: float) -> Tensor:
        """Wait for the losses, and the norm, of a step that began at ``start``."""
        losses = agreement.wait()
        if self._max_norm is not None:
            self._norm = agreement.norm()
        self._metrics.losses = losses
        self._metrics.computing = self._metrics.seconds = perf_counter() - start
        return losses

    def evaluate(
        self,
        batch: Batch | Inputs | None = None,
        target: Part | None = None,
        **named: Tensor,
    ) -> Tensor:
        """The loss of each microbatch in eval mode, without gradients.

        Batches may be of another shape than in training, but not for stages that the trainer cut.
        Arguments, result and errors are those of ``step``.
        """
        with self._guard("the evaluation"), eval_mode(self.modules.values()):
            agreement = self._runner.evaluate(paired(batch, target, named))
        return agreement.wait()

    def measure(self, batch: Batch | None, metric_fn: MetricFunction) -> dict[str, Tensor]:
        """What a metric finds in the model's outputs in eval mode, without gradients.

        Args:
            batch: as for ``evaluate``.
            metric_fn: ``metric_fn(output, targets)`` gives numbers by name for one microbatch, or
                tensors of one. It is called where the last stage is, on its device, with what the
                loss is given.

        Returns:
            For each name the numbers of all microbatches, float64 of shape [M], and the losses as
            "loss"; the same on every rank of the pipeline.

        Raises:
            PipelineError: as for ``step``; or the metric gives something else.
        """
        with self._guard("the evaluation"), eval_mode(self.modules.values()):
            agreement, own = self._runner.measure(batch, metric_fn)
            found = by_name(self._groups.gather(own))
        return {"loss": agreement.wait(), **found}

    def gradients(self) -> dict[int, dict[str, Tensor]]:
        """This process's gradients, by stage and by parameter name within the stage."""
        return {
            index: {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            for index, module in self.modules.items()
        }

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """The state of this process's modules, by stage, with the names within the stage."""
        return {index: module.state_dict() for index, module in self.modules.items()}

    def metrics(self, *, peak_flops: float | None = None) -> dict[str, float]:
        """What the last ``step`` (or ``forward_backward``) took, for a logger. Asks no other rank,
        so that one may call it alone, and costs a step nothing.

        Args:
            peak_flops: floating-point operations that the device can do in a second.

        Returns:
            By name, those that are known: ``loss``, the mean over the batch; ``seconds``, with the
            optimizer; ``grad_norm``, with ``max_grad_norm``; ``samples_per_s`` of this pipeline,
            and ``tokens_per_s``, where inputs are ids; ``flops_per_s``
            of this rank's products, recomputed ones not counted, and ``mfu``, their share of
            ``peak_flops``; ``bubble``, the share of forward and backward in which this rank ran
            nothing, with ``record``; ``peak_memory``, the most bytes that it held, on an
            accelerator or with ``record="memory"``.

        Raises:
            PipelineError: there was no step, or the last one was a ``step_async``.
        """
        found = self._metrics.numbers(peak_flops)
        return found if self._norm is None else {**found, "grad_norm": self._norm}

    def report(self, *, peak_flops: float | None = None) -> str:
        """``metrics`` as text, under what is trained."""
        return f"{self!r}\n\n{metrics_table(self.metrics(peak_flops=peak_flops))}"

    def timeline(self) -> Timeline:
        """What all ranks ran in the last step, which must have been recorded; call on all ranks.

        Ranks share a clock only if they run on one machine.

        Raises:
            PipelineError: nothing was recorded.
        """
        with self._guard("gathering the timeline"):
            if not self._runner.spans:
                raise PipelineError(
                    "there is no recorded step: set record=True before a step, then ask"
                )
            rows = self._groups.gather(self._runner.spans)
        return Timeline(len(rows), tuple(span for row in rows for span in row))

    def store_link(self) -> Link:
        """The slowest rank's link to its store, as measured now: ``Transfer.host`` of a simulation.
        Call on all ranks, between steps.

        Raises:
            PipelineError: no rank has a store.
        """
        with self._guard("measuring stores"):
            return self._runner.memory.host_link()

    def memory(self) -> StepMemory:
        """What all ranks held in the forward and backward of the last step, and the peak that was
        predicted for each; the step must have been run with ``record="memory"``. Call on all ranks.

        Raises:
            PipelineError: memory was not recorded.
        """
        with self._guard("gathering the memory"):
            memory = self._runner.memory
            if memory.recorder is None:
                raise PipelineError(
                    "the memory of the last step was not recorded: set record='memory' before a "
                    "step, then ask; predict_memory(batch) tells what a step will hold"
                )
            rows = self._groups.gather((memory.recorder.bands(), memory.predicted()))
        return StepMemory.of(rows)

    def predict_memory(self, batch: Batch | None) -> StepMemory:
        """What all ranks will hold in a step with this batch, before it runs. Call on all ranks.

        Stages are built for the batch, as the first step with it would, and kept; of the model
        nothing is run. Nothing is measured: ``peak_activations`` and ``bands`` are empty.

        Args:
            batch: as for ``step``.

        Raises:
            PipelineError: as for ``step``.
        """
        with self._guard("predicting the memory"):
            memory = self._runner.predict(batch)
            rows = self._groups.gather((memory.predicted(), memory.fixed_bytes()))
        peaks, fixed_by_rank = zip(*rows, strict=True)
        return StepMemory((), peaks, fixed_by_rank, ())

    @contextlib.contextmanager
    def together(self, where: str) -> Iterator[Groups]:
        """Let all ranks do something between two steps; gives what they talk through.

        Whatever is raised inside ends the trainer on every rank.

        Args:
            where: what that is, for errors: "saving a checkpoint".

        Raises:
            PipelineError: an error on any rank, a lost peer, or a timeout.
        """
        with self._guard(where):
            yield self._groups

    def finish(self, end: Callable[[], None] | None = None) -> None:
        """Wait for what was begun beside the steps, such as a save, and raise what went wrong.

        Args:
            end: waits for something that begins now, which is to be waited for in the next call.
        """
        ends, self._ends = self._ends, []
        with contextlib.ExitStack() as stack:  # all of them, whichever fails
            for each in ends:
                stack.callback(each)
        if end is not None:
            self._ends.append(end)

    def close(self) -> None:
        """Give back the process groups. All ranks should be done.

        Raises:
            CheckpointError: a save that was begun beside the steps has failed, and nobody waited.
        """
        try:
            self.finish()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if self._watch is not None:
            self._watch.leave("closed its trainer")
        self._held.close()
        self._groups.destroy()
        self._guard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._guard.left(error)
            with contextlib.suppress(AutosplitError):  # of a save; the first cause is on its way
                self.finish()
        self.close()

    def _end(self) -> None:
        """What a fault leads to."""
        made = self.__dict__  # the fault may have come before
        if self._watch is not None:
            self._watch.stop()
        if "_held" in made:
            self._held.close()
        self._groups.close()
