"""Trains a model that is cut into stages, over any number of processes."""

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
    asked,
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
from autosplit.trainer.whole_model import Example, Model, cut, is_whole, refuse_beside_stages


class PipelineTrainer:
    """Trains a pipeline of stages: one process per stage, or several stages per process.

    Every process makes the same calls. Start them with torchrun or ``autosplit.pipeline.launch``.
    A batch that one rank refuses all refuse (``BatchError``). Whatever else goes wrong on one rank
    ends the trainer on all of them, with the first cause as message; a new trainer must then be
    built.

    Args:
        model: the modules in order (a list, or an ``nn.ModuleList``), or a function that builds
            module ``index`` and is called for this process's stages only: outputs of one are the
            positional inputs of the next. Or a model that ``autosplit.partition`` has cut, or any
            other ``nn.Module``, ``nn.Sequential`` included, which it then cuts into ``stages``.
        loss_fn: ``loss_fn(output, targets)`` gives the scalar loss of one microbatch, a tensor; a
            step trains the mean over the microbatches.
        optimizer_fn: builds the optimizer of this process's parameters.
        stages: how many stages there are; required with a function and with a whole model.
        example: the inputs of one microbatch, to cut a whole model with: a tensor, a tuple, or
            a dictionary of keyword arguments. With anything but a whole model not allowed.
        schedule: a name from ``autosplit.pipeline.SCHEDULES``, a Schedule, or ``"auto"``:
            measure the first three steps and run the shortest schedule that ``search`` finds for
            them from then on, on the same placement and within the memory of the split schedule
            that they ran.
        microbatches: M, into how many equal parts a batch is cut along dimension 0.
        max_grad_norm: clips the norm of the whole model's gradient to this.
        device: where this process's stages go; None means the current CUDA device if the default
            process group has NCCL, torch's default device on one rank, else the CPU.
        ranks: how many processes take part; None means all. 1 keeps all stages in this process
            and needs no process group.
        mesh: which ranks run one pipeline (dimension ``"pp"``), which replicas of it
            (``"dp_replicate"``, and ``"dp_shard"`` of those whose parameters are sharded), and
            which share the tensors of a stage (``"tp"``), in any order.
            Each replica takes its own share of the batch, and all have the mean of their gradients,
            as under DistributedDataParallel. All start with the parameters and buffers of the
            first. A function that builds stages shards them by torch's ``fully_shard`` over
            ``mesh["dp_shard"]``, or ``mesh["dp_replicate", "dp_shard"]``: whole in a step, sharded
            between steps. Stages are made tensor parallel by torch's ``parallelize_module`` over
            ``mesh["tp"]``; the ranks along it are given the same batch. Replicas reduce gradients
            at the end of a step.
        memory_limit: bytes, or text such as ``"12GiB"``, that no rank may hold more than, of
            parameters, gradients, optimizer state, microbatches and what calls need. On the
            placement of ``schedule``, the shortest step within it is searched, by what graphs,
            messages and kernels are known to hold: before the first step by usual times, and after
            three steps by theirs. Where none is found, a PipelineError says the least limit that
            was found to do. It may keep microbatches in the host's store or in
            the memory of a partner rank, or run forwards again.
        stage_options: how stages are made.
        run_options: how steps run.

    Attributes:
        modules: this process's modules by stage, with their parameters.
        optimizer: what ``optimizer_fn`` made, for learning rate schedulers; None on a rank that has
            nothing to train.
        shared_parameters: groups of (stage, name) that are one parameter.
        device: where this process's stages are.
        mesh: as given; None: there is one pipeline.

    Raises:
        PipelineError: no process group, a count that does not fit, ranks that were told different
            things, a bad stage, or any other bad argument.
        ScheduleError: an unknown placement of weight gradients, or an illegal schedule.
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
        made, run = stage_options or StageOptions(), run_options or RunOptions()
        for name, given, kind in (
            ("stage_options", made, StageOptions),
            ("run_options", run, RunOptions),
        ):
            if not isinstance(given, kind):
                raise PipelineError(
                    f"{name} is a {kind.__name__}(...) of autosplit.pipeline; "
                    f"got a {type(given).__name__}"
                )
        with asked():
            request = ScheduleRequest(
                schedule, microbatches, ranks, run.split_backward, run.weights
            )
        limit = (
            None
            if memory_limit is None
            else parse_size(memory_limit, "memory_limit", PipelineError)
        )
        options = TrainerOptions(request, made, run, max_grad_norm, limit, mesh)
        if is_whole(model):
            source, schedule = cut(model, stages, example, options)
            layout = options.layout(source.count)
        else:
            refuse_beside_stages(model, example=example, planning=made.planning)
            source = StageSource.of(model, stages)
            layout = options.layout(source.count)
            schedule = options.schedule_for(source.count, len(layout.pipeline))
        check_record(run.record)
        self.shared_parameters = union_of_groups(source.shared, made.shared_parameters)
        self._ends: list[Callable[[], None]] = []
        self._max_norm = max_grad_norm
        self._norm: float | None = None
        self._losses: Tensor | None = None
        self._nonfinite, self._optimizer_moves, self._skipped = run.nonfinite, True, 0
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
        """Connect the ranks, and put together what trains; collective."""
        factory = options.factory(cut=source.cut)
        check_unanimous(self._said(source, options, schedule, factory), layout)
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
            # Whoever gets here knows that every other rank did.
            everybody = self._groups.everybody
            everybody.barrier()
        self._meet = everybody.barrier if everybody.ranks > 1 else None
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
            self._groups.add_external_group(options.mesh.get_group(layout.inner))
        everybody = self._groups.everybody
        faults = FaultStore(everybody.store) if everybody.ranks > 1 else None
        self._watch = watch_over(self._groups) if everybody.ranks > 1 else None
        if self._watch is not None:
            dropped = weakref.finalize(self, self._watch.leave, "dropped its trainer")
            dropped.atexit = False  # how the process ends says more
        self._guard = Guard(everybody.rank, faults, self._end, self._groups.activity, self._watch)

    def _said(
        self,
        stages: StageSource,
        options: TrainerOptions,
        schedule: Schedule,
        factory: StageFactory,
    ) -> dict[str, Any]:
        """What all ranks must be told alike: what changes results. ``memory`` and ``overlap``
        change no bit, and may be a rank's own, unless ranks share tensors: then their graphs must
        have the same collectives in the same order.
        """
        of_graphs = ("memory", "overlap") if options.exchanges else ()
        of_stage = ("backend", "grad_dtype", *of_graphs)
        return {
            "stages": stages.count,
            "microbatches": options.schedule.microbatches,
            "schedule": schedule,
            "memory_limit": options.memory_limit,  # first: what has one measures as "auto" does
            "schedule='auto'": options.tunes,
            "autocast": options.stages.autocast,
            "max_grad_norm": options.max_grad_norm,
            "nonfinite": options.run.nonfinite,
            "shared_parameters": [*map(list, self.shared_parameters)],
            "wiring": stages.wiring,
            "stage_factory": None if isinstance(factory, SplitStage) else "given",
            **{name: getattr(factory, name, None) for name in of_stage},
        }

    @property
    def record(self) -> Record:
        """What is recorded of each step, as in ``RunOptions``; may be changed between steps."""
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
        target: BatchPart | None = None,
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
                A tensor that needs a gradient gets that of the step's loss, as from ``backward()``,
                on the one rank whose stage takes it; others pass it detached, or None.
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
        losses = self.forward_backward(batch, target, **named)
        if self._optimizer_moves:
            with self._guard.during("the optimizer step"):
                self._model.step(self._max_norm, self._norm, self._meet)
        self._seconds = perf_counter() - start
        return losses

    def step_async(
        self,
        batch: Batch | Inputs | None = None,
        target: BatchPart | None = None,
        **named: Tensor,
    ) -> StepReduction:
        """Run one training step without waiting for the other ranks at its end.

        A rank that is done goes on to the next step, so that one step's start fills the idle end
        of the one before; losses and weights are bit for bit those of ``step``. But an optimizer
        moves as soon as its own rank has its gradients: after a failure, ranks may have come
        one step apart, and only a checkpoint gets them together again.

        With ``max_grad_norm`` a rank waits for the norm, which the last one to have its gradients
        completes, but not for the optimizers of others. With ``RunOptions(nonfinite="skip")`` it
        waits as long. Under ``"raise"`` without a norm, a rank looks at its own gradients before
        its optimizer moves, and ``wait()`` raises where those of others are not finite.

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
        with self._guard.during("the forward and backward of step_async"):
            self._losses = None
            agreement = self._runner.train(paired(batch, target, named), waits=False)
        if self._max_norm is None and self._nonfinite != "skip":
            agreement.check_local()
            self._runner.backward_batch()
        else:
            agreement.wait()
            self._decide(agreement)
        if self._optimizer_moves:
            with self._guard.during("the optimizer step"):
                self._model.step(self._max_norm, self._norm)
        return agreement

    def forward_backward(
        self,
        batch: Batch | Inputs | None = None,
        target: BatchPart | None = None,
        **named: Tensor,
    ) -> Tensor:
        """Run the schedule and add the gradients of the mean loss to the parameters' ``.grad``.

        Arguments, result and errors are those of ``step``. Returns only once all ranks are done.
        """
        start = perf_counter()
        with self._guard.during("the forward and backward"):
            agreement = self._runner.train(paired(batch, target, named))
        self._losses = losses = agreement.wait()
        self._decide(agreement)
        self._bounds = agreement.bounds()
        self._seconds = perf_counter() - start
        return losses

    def _decide(self, agreement: StepReduction) -> None:
        """Take note of a step's norm, and whether optimizers may move by its gradients; all ranks
        decide alike.
        """
        if self._max_norm is not None:
            self._norm = agreement.norm()
        self._optimizer_moves = self._nonfinite == "ignore" or agreement.finite
        if self._optimizer_moves:
            self._runner.backward_batch()
        else:
            self._model.drop_gradients()
            self._skipped += 1

    def evaluate(
        self,
        batch: Batch | Inputs | None = None,
        target: BatchPart | None = None,
        **named: Tensor,
    ) -> Tensor:
        """The loss of each microbatch in eval mode, without gradients.

        Batches may be of another shape than in training, but not for stages that the trainer cut.
        Arguments, result and errors are those of ``step``.
        """
        with self._guard.during("the evaluation"), eval_mode(self.modules.values()):
            agreement = self._runner.evaluate(paired(batch, target, named))
        return agreement.wait()

    def measure(self, batch: Batch | None, metric_fn: Callable[[Any, Any], Any]) -> list[Any]:
        """What a metric finds in the model's outputs in eval mode, without gradients.

        Args:
            batch: as for ``evaluate``.
            metric_fn: ``metric_fn(output, targets)`` gives numbers, or whatever can be pickled, for
                one microbatch. It is called where the last stage is, on its device, with what the
                loss is given.

        Returns:
            What it gave for each microbatch, the same on every rank of the pipeline.

        Raises:
            PipelineError: as for ``step``.
        """
        rows: list[Any] = []
        with self._guard.during("the evaluation"), eval_mode(self.modules.values()):
            agreement = self._runner.evaluate(
                batch, lambda output, targets: rows.append(metric_fn(output, targets))
            )
            found: list[Any] = next(filter(None, self._groups.gather(rows)))
        agreement.wait()
        return found

    def gradients(self) -> dict[int, dict[str, Tensor]]:
        """This process's gradients, by stage and by parameter name within the stage."""
        return {
            index: {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            for index, module in self.modules.items()
        }

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """The state of this process's modules, by stage, with the names within the stage."""
        return {index: module.state_dict() for index, module in self.modules.items()}

    def metrics(self) -> dict[str, float]:
        """What the last ``step`` (or ``forward_backward``) took, for a logger. Asks no other rank,
        so that one may call it alone, and costs a step nothing.

        Returns:
            By name: ``loss``, the mean over the batch; ``seconds``, with the optimizer;
            ``samples_per_s`` of this pipeline; ``grad_norm``, with ``max_grad_norm``; ``skipped``,
            the steps so far that ``nonfinite="skip"`` has dropped, with it; with
            ``record`` ``idle``, the share of forward and backward in which this rank computed
            nothing, which is ``timeline().bubble_ratio(rank)``;
            ``peak_memory``, the most bytes that it held, with ``record="memory"``.

        Raises:
            PipelineError: there was no step, or the last one was a ``step_async``.
        """
        step, memory = self._runner.memory.step, self._runner.memory.recorder
        if self._losses is None or step is None:
            raise PipelineError(
                "there are no metrics of the last step: call step(...) first. A step_async(...) "
                "has none, as nobody waited for its end"
            )
        found = {"loss": self._losses.mean().item(), "seconds": self._seconds}
        rows = (meta.shape[0] for meta in step.metas.values() if meta.shape)
        if (samples := next(rows, None)) is not None:
            found["samples_per_s"] = samples / self._seconds
        if self._norm is not None:
            found["grad_norm"] = self._norm
        if self._nonfinite == "skip":
            found["skipped"] = float(self._skipped)
        if self._runner.spans:
            spans = tuple(self._runner.spans)
            timeline = Timeline(self._groups.ranks, spans, bounds=self._bounds)
            found["idle"] = timeline.bubble_ratio(self.rank)
        if memory is not None:
            found["peak_memory"] = float(max(each.total for each in memory.bands()))
        return found

    def timeline(self) -> Timeline:
        """What all ranks ran in the last step, which must have been recorded; call on all ranks.

        Ranks share a clock only if they run on one machine.

        Raises:
            PipelineError: nothing was recorded.
        """
        with self._guard.during("gathering the timeline"):
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
        with self._guard.during("measuring stores"):
            return self._runner.memory.host_link()

    def memory(self) -> StepMemory:
        """What all ranks held in the forward and backward of the last step, and the peak that was
        predicted for each; the step must have been run with ``record="memory"``. Call on all ranks.

        Raises:
            PipelineError: memory was not recorded.
        """
        with self._guard.during("gathering the memory"):
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
        with self._guard.during("predicting the memory"):
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
        with self._guard.during(where, announced=True):
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
            with contextlib.suppress(AutosplitError):  # of a save; the first cause is on its way
                self.finish()
        self.close()

    def _end(self) -> None:
        """What a fault leads to."""
        made = self.__dict__  # the fault may have come before
        if self._watch is not None:
            self._watch.stop()
        if "_model" in made:
            self._model.close()
        self._groups.close()


def _check_function(name: str, given: object, example: str) -> None:
    if not callable(given):
        raise PipelineError(
            f"{name} is a function, such as {example}, which this process calls; "
            f"got a {type(given).__name__}"
        )
