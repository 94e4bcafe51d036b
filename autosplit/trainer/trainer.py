"""The trainer: runs a schedule of pipeline stages over one or more processes."""

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
from torch.distributed.device_mesh import DeviceMesh

from autosplit.errors import AutosplitError, PipelineError
from autosplit.mesh.costs import Link
from autosplit.mesh.dimensions import RankLayout
from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.pipeline.engine.evaluation import eval_mode
from autosplit.pipeline.engine.stage_builder import SplitStage
from autosplit.pipeline.engine.stage_protocols import StageFactory, TrainableStage
from autosplit.pipeline.ledger.bands import StepMemory
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.simulate import Timeline
from autosplit.ranks.fault_store import FaultStore
from autosplit.ranks.first_error import Guard
from autosplit.ranks.groups import Groups, await_device
from autosplit.ranks.watch import watch_over
from autosplit.text.figures import parse_size
from autosplit.trainer.agreement import StepReduction, check_unanimous
from autosplit.trainer.batches import Batch, BatchPart, Inputs, paired
from autosplit.trainer.options import (
    Record,
    RunOptions,
    StageOptions,
    TrainerOptions,
    as_pipeline_error,
    check_record,
    choose_device,
    store_for,
)
from autosplit.trainer.rank_model import OptimizerFunction, RankModel
from autosplit.trainer.runner import Runner
from autosplit.trainer.stage_modules import (
    LossFunction,
    StageSource,
    union_of_groups,
)
from autosplit.trainer.whole_model import (
    Example,
    Model,
    cut_whole_model,
    is_whole,
    refuse_whole_model_options,
)


class PipelineTrainer:
    """Trains a model that is cut into pipeline stages, over one or more processes.

    Each process (rank) holds one or more stages. Start the processes with torchrun or
    ``autosplit.pipeline.launch``. Every process must make the same calls in the same order::

        with process_group():
            trainer = PipelineTrainer(
                model, loss_fn, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
                stages=4, example=microbatch_inputs, microbatches=8,
            )
            for inputs, targets in batches:
                losses = trainer.step((inputs, targets))  # shape [8], the same on every rank

    If one rank refuses a batch, all ranks raise ``BatchError``, and the next step may follow. Any
    other error on one rank ends the trainer on all ranks, with the first cause as the message;
    build a new trainer then.

    Args:
        model: the stages, or a model to cut into stages. One of:
            a list or an ``nn.ModuleList`` of the stages in order, where the outputs of one stage
            are the positional inputs of the next;
            a function ``build(index)`` that returns stage ``index``, which is called for this
            process's stages only;
            a model that ``autosplit.partition`` has cut;
            any other ``nn.Module``, ``nn.Sequential`` included, which the trainer cuts into
            ``stages`` stages.
        loss_fn: ``loss_fn(output, targets)`` returns the loss of one microbatch, a scalar tensor. A
            step trains the mean over the microbatches.
        optimizer_fn: ``optimizer_fn(parameters)`` returns the optimizer of this process's
            parameters.
        microbatches: M, the number of equal parts into which a batch is cut along dimension 0.
        stages: the number of stages; required for a function and for a whole model.
        example: the inputs of one microbatch: a tensor, a tuple of tensors, or a dictionary of
            keyword arguments. Required for a whole model, and for nothing else.
        schedule: a name from ``autosplit.pipeline.SCHEDULES``, a Schedule, or ``"auto"``. With
            ``"auto"`` the first three steps are measured; later steps run the shortest schedule
            that ``search`` finds for these times, with the same placement and no more memory.
        max_grad_norm: the largest norm of the whole model's gradient; a larger one is scaled down
            to it. None: gradients are not clipped.
        device: the device of this process's stages. None: the current CUDA device if the default
            process group has NCCL; on one rank, torch's default device; else the CPU.
        ranks: the number of processes; None: all of the default process group. 1 keeps all stages
            in this process and needs no process group.
        mesh: a mesh with these dimensions, in any order. ``"pp"``: the ranks of one pipeline.
            ``"dp_replicate"``: replicas of the pipeline. ``"dp_shard"``: replicas that shard their
            parameters. ``"tp"``: ranks that share the tensors of a stage. None: one pipeline.
            Each replica takes its own share of the batch. At the end of a step the replicas reduce
            gradients to their mean, as under DistributedDataParallel. All replicas start with the
            parameters and buffers of the first.
            A function that builds stages shards them with torch's ``fully_shard`` over
            ``mesh["dp_shard"]``, or over ``mesh["dp_replicate", "dp_shard"]``. Parameters are
            gathered for a step and sharded between steps. Stages become tensor parallel by torch's
            ``parallelize_module`` over ``mesh["tp"]``; the ranks along it take the same batch.
        memory_limit: the most bytes that a rank may hold, or a text such as ``"12GiB"``. It counts
            parameters, gradients, optimizer state, the batch, microbatches, messages and the
            temporary memory of operators. The trainer searches the shortest step within the limit,
            with the placement of ``schedule``: before the first step by usual times, after three
            steps by measured ones. The schedule may offload microbatches to the host, move them to
            a partner rank, or recompute forwards. If no schedule is found, a step raises a
            PipelineError with the least limit that was found to work.
        stage_options: how stages are built and compiled.
        run_options: how steps run.

    Attributes:
        modules: this process's modules by stage, with their parameters.
        optimizer: the optimizer that ``optimizer_fn`` returned, for learning-rate schedulers; None
            on a rank without parameters to train.
        shared_parameters: groups of (stage, name) that are one parameter of the model.
        device: the device of this process's stages.
        mesh: see Args.

    Raises:
        PipelineError: there is no process group and one is needed, a count does not fit, ranks
            passed different arguments, or an argument is wrong.
        CaptureError: a whole model cannot be captured in one graph; names the user's line.
        PlanError: a whole model cannot be cut into ``stages`` stages.
        ScheduleError: the name of a placement of weight gradients is unknown, or the schedule is
            not valid.
    """

    def __init__(
        self,
        model: Model,
        loss_fn: LossFunction,
        optimizer_fn: OptimizerFunction,
        *,
        microbatches: int,
        stages: int | None = None,
        example: Example | None = None,
        schedule: str | Schedule = "1f1b",
        max_grad_norm: float | None = None,
        device: torch.device | str | None = None,
        ranks: int | None = None,
        mesh: DeviceMesh | None = None,
        memory_limit: int | str | None = None,
        stage_options: StageOptions | None = None,
        run_options: RunOptions | None = None,
    ) -> None:
        _check_function("loss_fn", loss_fn, "torch.nn.functional.cross_entropy")
        _check_function(
            "optimizer_fn", optimizer_fn, "lambda parameters: torch.optim.AdamW(parameters)"
        )
        stage_options, run_options = stage_options or StageOptions(), run_options or RunOptions()
        for name, value, kind in (
            ("stage_options", stage_options, StageOptions),
            ("run_options", run_options, RunOptions),
        ):
            if not isinstance(value, kind):
                raise PipelineError(
                    f"{name} must be a {kind.__name__}(...) of autosplit.pipeline; "
                    f"got a {type(value).__name__}"
                )
        with as_pipeline_error():
            request = ScheduleRequest(
                schedule, microbatches, ranks, run_options.split_backward, run_options.weights
            )
        if memory_limit is not None:
            memory_limit = parse_size(memory_limit, "memory_limit", PipelineError)
        options = TrainerOptions(
            request, stage_options, run_options, max_grad_norm, memory_limit, mesh
        )
        if is_whole(model):
            source, schedule = cut_whole_model(model, stages, example, options)
            layout = options.layout(source.count)
        else:
            refuse_whole_model_options(model, example=example, planning=stage_options.planning)
            source = StageSource.of(model, stages)
            layout = options.layout(source.count)
            schedule = options.schedule_for(source.count, len(layout.pipeline))
        check_record(run_options.record)
        self.shared_parameters = union_of_groups(source.shared, stage_options.shared_parameters)
        self._background_waits: list[Callable[[], None]] = []
        self._max_norm = max_grad_norm
        self._norm: float | None = None
        self._losses: Tensor | None = None
        self._nonfinite, self._optimizer_moves, self._skipped = run_options.nonfinite, True, 0
        self.device, self.mesh = choose_device(device, layout), mesh
        self._begin(source, loss_fn, optimizer_fn, options, schedule, layout)

    def _begin(
        self,
        source: StageSource,
        loss_fn: LossFunction,
        optimizer_fn: OptimizerFunction,
        options: TrainerOptions,
        schedule: Schedule,
        layout: RankLayout,
    ) -> None:
        """Connect the ranks, and build the modules, the optimizer and the runner; collective."""
        factory = options.factory(cut=source.cut)
        check_unanimous(self._shared_settings(source, options, schedule, factory), layout)
        self._connect(layout, options)
        synchronize = partial(await_device, self.device, self._guard, options.run.timeout)
        with self._guard.during("building the model"):
            store = store_for(options, schedule, self.device)
            self._model = rank_model = RankModel(
                source, self.shared_parameters, schedule, self._groups, self.device, synchronize
            )
            if not isinstance(factory, SplitStage):
                rank_model.sharded.refuse_factory(factory)
            self.modules = rank_model.modules
            rank_model.build_optimizer(optimizer_fn)
            self.optimizer = rank_model.optimizer
            # After the barrier, every rank has built its part.
            everybody = self._groups.everybody
            everybody.barrier()
        self._barrier = everybody.barrier if everybody.ranks > 1 else None
        self._runner = Runner(
            source,
            loss_fn,
            schedule,
            options,
            rank_model,
            self._groups,
            self._guard,
            self.device,
            store,
        )

    def __repr__(self) -> str:
        """The rank, its stages and the schedule, in one line."""
        schedule, position = self.schedule, f"rank {self.rank} of {len(self.schedule.ranks)}"
        return (
            f"{type(self).__name__}({position}, stages {[*self.modules]} of {schedule.stages}, "
            f"schedule {schedule.name!r}, {schedule.microbatches} microbatches)"
        )

    def _connect(self, layout: RankLayout, options: TrainerOptions) -> None:
        """Connect the ranks, and start the watch of each over the others."""
        self._groups = Groups(layout, self.device, options.run.timeout)
        if options.mesh is not None and layout.inner:
            self._groups.add_external_group(options.mesh.get_group(layout.inner))
        everybody = self._groups.everybody
        faults = FaultStore(everybody.store) if everybody.ranks > 1 else None
        self._watch = watch_over(self._groups) if everybody.ranks > 1 else None
        if self._watch is not None:
            dropped = weakref.finalize(self, self._watch.leave, "dropped its trainer")
            dropped.atexit = False  # the exit of the process says more
        self._guard = Guard(everybody.rank, faults, self._end, self._groups.activity, self._watch)

    def _shared_settings(
        self,
        stages: StageSource,
        options: TrainerOptions,
        schedule: Schedule,
        factory: StageFactory,
    ) -> dict[str, Any]:
        """Options that must be equal on all ranks, because they change results.

        ``memory`` and ``overlap`` do not change results, and may differ between ranks. If ranks
        share tensors, they must be equal: the ranks' graphs need the same order of collectives.
        """
        graph_options = ("memory", "overlap") if options.exchanges else ()
        factory_options = ("backend", "grad_dtype", *graph_options)
        return {
            "stages": stages.count,
            "microbatches": options.schedule.microbatches,
            "schedule": schedule,
            "memory_limit": options.memory_limit,  # first: a limit turns on measurements, too
            "schedule='auto'": options.tunes,
            "autocast": options.stages.autocast,
            "max_grad_norm": options.max_grad_norm,
            "nonfinite": options.run.nonfinite,
            "shared_parameters": [*map(list, self.shared_parameters)],
            "wiring": stages.wiring,
            "stage_factory": None if isinstance(factory, SplitStage) else "given",
            **{name: getattr(factory, name, None) for name in factory_options},
        }

    @property
    def record(self) -> Record:
        """The record of each step, see ``RunOptions``; may be set between steps."""
        return self._runner.record

    @record.setter
    def record(self, record: Record) -> None:
        check_record(record)
        self._runner.record = record

    @property
    def rank(self) -> int:
        """This process's rank in its pipeline; with a mesh, its coordinate along "pp"."""
        return self._groups.rank

    @property
    def schedule(self) -> Schedule:
        """The schedule of training steps; ``"auto"`` replaces it after the measured steps."""
        return self._runner.schedule

    @property
    def settled(self) -> bool:
        """Whether ``schedule`` is final: False while steps are measured for a better one."""
        return self._runner.settled

    @property
    def grad_norm(self) -> float | None:
        """The norm of the model's gradient in the last step, before clipping; None without
        ``max_grad_norm``.
        """
        return self._norm

    @property
    def stages(self) -> Mapping[int, TrainableStage]:
        """This process's stages of the last step, by index; empty before the first step."""
        return self._runner.stages

    def step(
        self,
        batch: Batch | Inputs | None = None,
        target: BatchPart | None = None,
        **named: Tensor,
    ) -> Tensor:
        """Run one training step: all microbatches, clipping, the optimizer, and clear gradients.

        No optimizer moves before every rank has all its gradients. If a rank fails, the trainer
        ends on all ranks.

        Args:
            batch: (inputs, targets), each a tensor or a tuple of tensors with the samples along
                dimension 0; a replica of the pipeline passes its own share. For a model that was
                cut with keyword inputs, the inputs are a dictionary. ``()`` stands for no targets.
                With ``target``, ``batch`` is the inputs alone.
                The inputs are used on the ranks whose stages take them (in a chain, the first
                stage's rank), the targets on the last stage's rank; other ranks may pass None.
                An input that requires a gradient gets the gradient of the step's loss, as from
                ``backward()``, on the one rank whose stage takes it. Other ranks pass it detached,
                or None.
            target: the targets, as in torch's pipelines: ``step(x, target=y)``.
            named: keyword inputs, for a model that was cut with them: ``step(input_ids=ids,
                target=y)``.

        Returns:
            The loss of each microbatch, shape [M], on the CPU, the same on every rank of the
            pipeline. The loss of the step, to which the gradients belong, is their mean, averaged
            over the replicas of the pipeline.

        Raises:
            BatchError: a rank refuses the batch: it cannot be cut into M parts, its tensors have
                different numbers of samples, or ranks passed different ones. Nothing has run on
                any rank; the next step may follow.
            PipelineError: an error on any rank, a lost peer, or a timeout.
        """
        start = perf_counter()
        losses = self.forward_backward(batch, target, **named)
        if self._optimizer_moves:
            with self._guard.during("the optimizer step"):
                self._model.step(self._max_norm, self._norm, self._barrier)
        self._seconds = perf_counter() - start
        return losses

    def step_async(
        self,
        batch: Batch | Inputs | None = None,
        target: BatchPart | None = None,
        **named: Tensor,
    ) -> StepReduction:
        """Run one training step without waiting for the other ranks at its end.

        A rank that is done begins the next step, whose start fills the idle end of this step.
        Losses and weights equal those of ``step`` bit for bit. But an optimizer moves as soon as
        its own rank has its gradients. So after a failure, ranks may be one step apart; load a
        checkpoint then.

        With ``max_grad_norm``, or with ``RunOptions(nonfinite="skip")``, a rank waits until all
        ranks have their gradients, but not for the optimizers of others. With ``"raise"`` and no
        norm, a rank checks its own gradients before its optimizer moves, and ``wait()`` raises if
        gradients of other ranks are not finite.

        Args:
            batch: as for ``step``.
            target: as for ``step``.
            named: as for ``step``.

        Returns:
            The pending losses; ``wait()`` returns what ``step`` returns.

        Raises:
            BatchError: as for ``step``, if the inputs have a new shape.
            PipelineError: as for ``step``. If the inputs have a known shape, a refused batch raises
                it, too, because other ranks have not waited.
        """
        start = perf_counter()
        with self._guard.during("the forward and backward of step_async"):
            self._losses = None
            agreement = self._runner.train(paired(batch, target, named), waits=False)
        if self._max_norm is None and self._nonfinite != "skip":
            agreement.check_local()
            self._runner.backward_batch()
        else:
            self._finish_reduction(agreement)
        if self._optimizer_moves:
            with self._guard.during("the optimizer step"):
                self._model.step(self._max_norm, self._norm)
        self._seconds = perf_counter() - start
        return agreement

    def forward_backward(
        self,
        batch: Batch | Inputs | None = None,
        target: BatchPart | None = None,
        **named: Tensor,
    ) -> Tensor:
        """Run the schedule, and add the gradients of the mean loss to the parameters' ``.grad``.

        Arguments, result and errors are those of ``step``. Returns when all ranks are done.
        """
        start = perf_counter()
        with self._guard.during("the forward and backward"):
            agreement = self._runner.train(paired(batch, target, named))
        losses = self._finish_reduction(agreement)
        self._seconds = perf_counter() - start
        return losses

    def _finish_reduction(self, agreement: StepReduction) -> Tensor:
        """Wait for the losses of a step, and decide whether optimizers may move; all ranks decide
        the same. Returns the losses.
        """
        self._losses = losses = agreement.wait()
        if self._max_norm is not None:
            self._norm = agreement.norm()
        self._optimizer_moves = self._nonfinite == "ignore" or agreement.finite
        if self._optimizer_moves:
            self._runner.backward_batch()
        else:
            self._model.drop_gradients()
            self._skipped += 1
        self._bounds = agreement.bounds()
        return losses

    def evaluate(
        self,
        batch: Batch | Inputs | None = None,
        target: BatchPart | None = None,
        **named: Tensor,
    ) -> Tensor:
        """Return the loss of each microbatch in eval mode, shape [M], without gradients.

        Batches may have another shape than in training, unless the trainer has cut the model.
        Arguments, result and errors are those of ``step``.
        """
        with self._guard.during("the evaluation"), eval_mode(self.modules.values()):
            agreement = self._runner.evaluate(paired(batch, target, named))
        return agreement.wait()

    def measure(self, batch: Batch | None, metric_fn: Callable[[Any, Any], Any]) -> list[Any]:
        """Compute a metric of the model's outputs in eval mode, without gradients.

        Args:
            batch: as for ``evaluate``.
            metric_fn: ``metric_fn(output, targets)`` returns the metric of one microbatch, an
                object that can be pickled. It is called on the last stage's rank, with the
                arguments of ``loss_fn``.

        Returns:
            The metric of each microbatch, a list of length M, the same on every rank of the
            pipeline.

        Raises:
            PipelineError: as for ``step``.
        """
        rows: list[Any] = []
        with self._guard.during("the evaluation"), eval_mode(self.modules.values()):
            agreement = self._runner.evaluate(
                batch, lambda output, targets: rows.append(metric_fn(output, targets))
            )
            metrics: list[Any] = next(filter(None, self._groups.gather(rows)))
        agreement.wait()
        return metrics

    def gradients(self) -> dict[int, dict[str, Tensor]]:
        """This process's gradients, by stage and by parameter name within the stage."""
        return {
            index: {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            for index, module in self.modules.items()
        }

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """The state of this process's modules, by stage and by name within the stage."""
        return {index: module.state_dict() for index, module in self.modules.items()}

    def metrics(self) -> dict[str, float]:
        """Metrics of the last ``step`` (or ``forward_backward``), for a logger.

        Not collective: one rank may call it alone. It adds no cost to a step. A ``step_async`` has
        metrics with ``max_grad_norm`` or ``nonfinite="skip"``, which know its losses before its
        optimizer moves; ``seconds`` is then the time of the call.

        Returns:
            Numbers by name. ``loss``: the mean over the batch. ``seconds``: the time of the step,
            with the optimizer. ``samples_per_s``: samples per second of this pipeline.
            ``grad_norm``: only with ``max_grad_norm``. ``skipped``: the number of steps that
            ``nonfinite="skip"`` has dropped so far, only with it. ``idle``: the share of forward
            and backward in which this rank computed nothing, equal to
            ``timeline().bubble_ratio(rank)``; only with ``record``. ``peak_memory``: the most bytes
            that this rank held; only with ``record="memory"``.

        Raises:
            PipelineError: there was no step yet, or the last one was a ``step_async`` that did
                not wait for the losses.
        """
        step, memory = self._runner.memory.step, self._runner.memory.recorder
        if self._losses is None or step is None:
            raise PipelineError(
                "there are no metrics of the last step: call step(...) first. step_async(...) has "
                "them with max_grad_norm or nonfinite='skip' only; else use its wait(), which "
                "returns the losses"
            )
        metrics = {"loss": self._losses.mean().item(), "seconds": self._seconds}
        rows = (meta.shape[0] for meta in step.metas.values() if meta.shape)
        if (samples := next(rows, None)) is not None:
            metrics["samples_per_s"] = samples / self._seconds
        if self._norm is not None:
            metrics["grad_norm"] = self._norm
        if self._nonfinite == "skip":
            metrics["skipped"] = float(self._skipped)
        if self._runner.spans:
            spans = tuple(self._runner.spans)
            timeline = Timeline(self._groups.ranks, spans, bounds=self._bounds)
            metrics["idle"] = timeline.bubble_ratio(self.rank)
        if memory is not None:
            metrics["peak_memory"] = float(max(band.total for band in memory.bands()))
        return metrics

    def timeline(self) -> Timeline:
        """The timeline of all ranks' actions in the last step; collective.

        The times of different ranks are comparable only if the ranks run on one machine.

        Raises:
            PipelineError: the step was not recorded.
        """
        with self._guard.during("gathering the timeline"):
            if not self._runner.spans:
                raise PipelineError(
                    "no step was recorded: set record=True before a step, then call timeline()"
                )
            rows = self._groups.gather(self._runner.spans)
        return Timeline(len(rows), tuple(span for row in rows for span in row))

    def store_link(self) -> Link:
        """Measure the link of each rank to its store, and return the slowest; collective.

        Call it between steps. A simulation takes the result as ``Transfer.host``.

        Raises:
            PipelineError: no rank has a store.
        """
        with self._guard.during("measuring stores"):
            return self._runner.memory.host_link()

    def memory(self) -> StepMemory:
        """The bytes that each rank held in the last step, and its predicted peak; collective.

        The step must have run with ``record="memory"``. It counts the forward and the backward.

        Raises:
            PipelineError: the memory was not recorded.
        """
        with self._guard.during("gathering the memory"):
            memory = self._runner.memory
            if memory.recorder is None:
                raise PipelineError(
                    "the memory of the last step was not recorded: set record='memory' before a "
                    "step, then call memory(); predict_memory(batch) predicts it without a step"
                )
            rows = self._groups.gather((memory.recorder.bands(), memory.predicted()))
        return StepMemory.of(rows)

    def predict_memory(self, batch: Batch | None) -> StepMemory:
        """Predict the bytes that each rank holds in a step with this batch; collective.

        The stages for the batch are built and kept, as by a first step with it; the model does not
        run. Nothing is measured: ``peak_activations`` and ``bands`` are empty.

        Args:
            batch: as for ``step``.

        Raises:
            PipelineError: as for ``step``.
        """
        with self._guard.during("predicting the memory"):
            memory = self._runner.predict(batch)
            rows = self._groups.gather((memory.predicted(), memory.fixed_bytes()))
        peaks, fixed_by_rank = zip(*rows, strict=True)
        return StepMemory((), peaks, fixed_by_rank, ())

    @contextlib.contextmanager
    def together(self, phase: str) -> Iterator[Groups]:
        """Run a block of code on all ranks between two steps; yields the process groups.

        An error inside ends the trainer on every rank.

        Args:
            phase: the phase in words, for errors, such as "saving a checkpoint".

        Raises:
            PipelineError: an error on any rank, a lost peer, or a timeout.
        """
        with self._guard.during(phase, announced=True):
            yield self._groups

    def finish(self, wait: Callable[[], None] | None = None) -> None:
        """Wait for background work, such as an asynchronous save, and raise its errors.

        Args:
            wait: waits for new background work; the next call calls it.
        """
        waits, self._background_waits = self._background_waits, []
        with contextlib.ExitStack() as stack:  # calls all of them, even if one fails
            for callback in waits:
                stack.callback(callback)
        if wait is not None:
            self._background_waits.append(wait)

    def close(self) -> None:
        """Wait for background work, and destroy the process groups. All ranks should be done.

        Raises:
            CheckpointError: an asynchronous save has failed, and its error was not raised yet.
        """
        try:
            self.finish()
        finally:
            self._release()

    def _release(self) -> None:
        if self._watch is not None:
            self._watch.leave("closed its trainer")
        self._model.close()
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
            with contextlib.suppress(AutosplitError):  # the first cause is raised instead
                self.finish()
        self.close()

    def _end(self) -> None:
        """Close all connections after a fault."""
        if self._watch is not None:
            self._watch.stop()
        if hasattr(self, "_model"):  # the fault may have come before
            self._model.close()
        self._groups.close()


def _check_function(name: str, value: object, example: str) -> None:
    if not callable(value):
        raise PipelineError(
            f"{name} must be a function, such as {example}, which this process calls; "
            f"got a {type(value).__name__}"
        )
