"""The trainer: runs a schedule of pipeline stages over one or more processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.pipeline.engine.evaluation import eval_mode
from autosplit.pipeline.engine.stage_factory import SplitStage
from autosplit.pipeline.engine.stage_protocols import StageFactory
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.groups import await_device
from autosplit.ranks.session import choose_device
from autosplit.trainer.agreement import StepReduction, check_unanimous
from autosplit.trainer.batches import NOT_PASSED, Batch, BatchPart, Inputs, paired
from autosplit.trainer.default_shards import shard_by_default
from autosplit.trainer.loss_gradients import Weight
from autosplit.trainer.options import (
    MemoryLimit,
    RunOptions,
    StageOptions,
    check_arguments,
    check_record,
    parse_limit,
)
from autosplit.trainer.rank_model import RankModel, ShardFunction
from autosplit.trainer.runner import Runner
from autosplit.trainer.sharded_optimizer import shard_stages
from autosplit.trainer.stage_modules import LossFunction, StageSource, union_of_groups
from autosplit.trainer.trained_parameters import OptimizerFunction
from autosplit.trainer.trainer_options import TrainerOptions, as_pipeline_error, store_for
from autosplit.trainer.training_steps import TrainingSteps
from autosplit.trainer.verification import Verification
from autosplit.trainer.whole_model import (
    Example,
    Model,
    cut_whole_model,
    is_whole,
    refuse_whole_model_options,
)


class PipelineTrainer(TrainingSteps):
    """Trains a model that is cut into pipeline stages, over one or more processes.

    Each process (rank) holds one or more stages. Start the processes with torchrun or
    ``autosplit.launch``. Every process must make the same calls in the same order::

        with process_group():
            trainer = PipelineTrainer(
                model, loss_fn, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
                stages=4, example=microbatch_inputs, microbatches=8,
            )
            for inputs, targets in batches:
                losses = trainer.step((inputs, targets))  # shape [8], the same on every rank

    If one rank refuses a batch, all ranks raise ``BatchError``, and the next step may follow. Any
    other error on one rank ends the trainer on all ranks, with the first cause as the message. A
    new trainer is needed then.

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
            step trains the mean over the microbatches. ``(loss, {"name": part})`` also returns
            named scalars, whose means are in ``metrics()`` and ``evaluation``.
        optimizer_fn: ``optimizer_fn(parameters)`` returns the optimizer of this process's
            parameters, a list. If its argument is called ``named`` or ``named_parameters``, it gets
            a list of (name, parameter) instead, with the names of the whole model, so that weight
            decay and learning rates can go by name. In a list of stages, names begin with the
            stage's index.
        microbatches: M, the number of parts into which a batch is cut along dimension 0, as
            ``torch.chunk`` does. A step may take a list of microbatches instead.
        stages: the number of stages; required for a function and for a whole model.
        example: the inputs of one microbatch: a tensor, a tuple of tensors, or a dictionary of
            keyword arguments. Required for a whole model; not allowed for other models.
        schedule: a name from ``autosplit.pipeline.SCHEDULES``, a Schedule, or ``"auto"``. With
            ``"auto"`` the first three steps are measured; later steps run the shortest schedule
            that ``search`` finds for these times, with the same placement and no more memory.
        max_grad_norm: the largest norm of the whole model's gradient; a gradient with a larger norm
            is scaled down to it. None: gradients are not clipped.
        device: the device of this process's stages. None: the current CUDA device if the default
            process group has NCCL; on one rank, torch's default device; else the CPU.
        ranks: the number of processes; None: all processes of the default process group. 1: all
            stages are in this process, and no process group is needed.
        mesh: a mesh with these dimensions, in any order. ``"pp"``: the ranks of one pipeline.
            ``"dp_replicate"``: replicas of the pipeline. ``"dp_shard"``: replicas that shard their
            parameters. ``"tp"``: ranks that share the tensors of a stage. None: one pipeline.
            Each replica takes its own share of the batch. At the end of a step the replicas reduce
            gradients to their mean, as under DistributedDataParallel. All replicas start with the
            parameters and buffers of the first.
            The trainer shards stages along ``"dp_shard"`` by torch's ``fully_shard``, unless a
            function that builds stages has done so; see ``StageOptions``. Parameters are gathered
            for a step and sharded between steps. Stages become tensor parallel by torch's
            ``parallelize_module`` over ``mesh["tp"]``; the ranks along it take the same batch.
        memory_limit: the most bytes that a rank may hold, or a text such as ``"12GiB"``; or a
            sequence of these, one for each rank of the pipeline. It counts parameters, gradients,
            optimizer state, the batch, microbatches, messages and the temporary memory of
            operators. The trainer searches the shortest step within the limit, with the placement
            of ``schedule``: before the first step for usual times, after three steps for measured
            times. The schedule may offload microbatches to the host, move them to a partner rank,
            or recompute forwards. If no schedule is found, a step raises a PipelineError with the
            smallest limit for which one was found. ``memory()`` says whether the limit was kept.
        stage_options: how stages are built and compiled.
        run_options: how steps run.

    Attributes:
        modules: this process's modules by stage, with their parameters.
        optimizer: the optimizer that ``optimizer_fn`` returned, for learning-rate schedulers; None
            on a rank without parameters to train.
        shared_parameters: groups of (stage, name) that are one parameter of the model.
        planning: how a whole model was cut: options for ``StageOptions(planning=...)`` that cut it
            again without measuring; None if the model was passed as stages. Checkpoints contain it.
        device: the device of this process's stages.
        mesh: as passed.
        evaluation: the mean ``"loss"`` of the last ``evaluate`` or ``measure``, and the means of
            the loss's named parts, over all microbatches of all replicas.

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
        memory_limit: MemoryLimit | None = None,
        stage_options: StageOptions | None = None,
        run_options: RunOptions | None = None,
    ) -> None:
        stage_options, run_options = stage_options or StageOptions(), run_options or RunOptions()
        check_arguments(loss_fn, optimizer_fn, stage_options, run_options)
        with as_pipeline_error():
            request = ScheduleRequest(
                schedule, microbatches, ranks, run_options.split_backward, run_options.weights
            )
        limit = None if memory_limit is None else parse_limit(memory_limit)
        options = TrainerOptions(request, stage_options, run_options, max_grad_norm, limit, mesh)
        if is_whole(model):
            source, schedule = cut_whole_model(model, stages, example, options)
            layout = options.layout(source.count)
        else:
            refuse_whole_model_options(model, example=example, planning=stage_options.planning)
            source = StageSource.of(model, stages)
            layout = options.layout(source.count)
            schedule = options.schedule_for(source.count, len(layout.pipeline))
        check_record(run_options.record)
        self.planning = source.planning
        self.shared_parameters = union_of_groups(source.shared, stage_options.shared_parameters)
        self.evaluation: dict[str, float] = {}
        self.device, self.mesh = choose_device(device, layout), mesh
        factory = options.factory(cut=source.cut)
        check_unanimous(
            options.shared_settings(source, schedule, self.shared_parameters, factory), layout
        )
        super().__init__(layout, options, self.device)
        self._build(source, loss_fn, optimizer_fn, options, schedule, factory)

    def _build(
        self,
        source: StageSource,
        loss_fn: LossFunction,
        optimizer_fn: OptimizerFunction,
        options: TrainerOptions,
        schedule: Schedule,
        factory: StageFactory,
    ) -> None:
        """Build this rank's modules, its optimizer and its runner; collective."""
        synchronize = partial(await_device, self.device, self._guard, options.run.timeout)
        with self._guard.during("building the model"):
            store = store_for(options, schedule, self.device)
            rank_model = RankModel(
                source,
                self.shared_parameters,
                schedule,
                self._groups,
                self.device,
                synchronize,
                self._shard_function(source, options),
            )
            self._releases.append(rank_model.restore_process_groups)
            if not isinstance(factory, SplitStage):
                rank_model.sharded.refuse_factory(factory)
            self.modules = rank_model.modules
            rank_model.build_optimizer(optimizer_fn)
            self._trained = rank_model.trained
            self.optimizer = self._trained.optimizer
            if self._drops_nonfinite:
                self._watch_optimizer()
            # After the barrier, every rank has built its part.
            everybody = self._groups.everybody
            everybody.barrier()
        self._barrier = everybody.barrier if everybody.ranks > 1 else None
        self._runner = Runner(
            source,
            loss_fn,
            schedule,
            options,
            factory,
            rank_model,
            self._groups,
            self._guard,
            self.device,
            store,
            self.shared_parameters,
        )
        self._around_step = nullcontext
        if (flight := self._runner.flight) is not None:
            self._releases.append(flight.release)
            self._around_step = partial(flight.recording, self.metrics)

    def _shard_function(self, source: StageSource, options: TrainerOptions) -> ShardFunction | None:
        """Return the function that shards this rank's stages; None if the trainer does not shard
        stages.
        """
        if options.optimizer_mesh is not None:
            return partial(
                shard_stages,
                shared=self.shared_parameters,
                mesh=options.optimizer_mesh,
                groups=self._groups,
            )
        if not options.shards:
            return None
        return partial(shard_by_default, source=source, options=options, groups=self._groups)

    def __repr__(self) -> str:
        """The rank, its stages and the schedule, in one line."""
        schedule, position = self.schedule, f"rank {self.rank} of {len(self.schedule.ranks)}"
        return (
            f"{type(self).__name__}({position}, stages {[*self.modules]} of {schedule.stages}, "
            f"schedule {schedule.name!r}, {schedule.microbatches} microbatches)"
        )

    def verify(
        self,
        batch: Batch | Inputs | None = None,
        target: BatchPart | None = NOT_PASSED,
        *,
        microbatches: Sequence[Any] | None = None,
        weight: Weight | None = None,
        **named: Tensor,
    ) -> Verification:
        """Compare the gradients of one step with those of plain autograd; collective.

        The same step runs twice: as in ``step``, and with each rank's modules under plain autograd,
        one microbatch after another. No optimizer moves, and parameters, buffers, gradients, random
        generators and counts of steps do not change. If ranks share or shard parameters, the
        reference is the same graphs in that order, with full backwards. Both runs use the trainer's
        messages and reductions, so a link that always changes the same bits is not detected.

        Arguments and errors are those of ``step``. A difference raises no error, because Inductor's
        kernels round differently from autograd's. Returns the comparison, the same on all ranks.
        """
        with self._guard.during("the verification"):
            paired_batch = paired(batch, target, named, microbatches)
            return self._runner.compare_gradients(paired_batch, weight)

    def evaluate(
        self,
        batch: Batch | Inputs | None = None,
        target: BatchPart | None = NOT_PASSED,
        *,
        microbatches: Sequence[Any] | None = None,
        weight: Weight | None = None,
        **named: Tensor,
    ) -> Tensor:
        """Return the loss of each microbatch in eval mode, shape [M], without gradients.

        Batches may have other shapes than in training. If the trainer has cut the model, the first
        call captures it for evaluation. Arguments, result and errors are those of ``step``. The
        attribute ``evaluation`` then has the mean losses.
        """
        with self._guard.during("the evaluation"), eval_mode(self.modules.values()):
            agreement = self._runner.evaluate(paired(batch, target, named, microbatches), weight)
        return self._finish_evaluation(agreement)

    def measure(
        self,
        batch: Batch | None,
        metric_fn: Callable[[Any, Any], Any],
        *,
        microbatches: Sequence[Any] | None = None,
    ) -> list[Any]:
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
                paired(batch, NOT_PASSED, {}, microbatches),
                observer=lambda output, targets: rows.append(metric_fn(output, targets)),
            )
            metrics: list[Any] = next(filter(None, self._groups.gather(rows)))
        self._finish_evaluation(agreement)
        return metrics

    def _finish_evaluation(self, agreement: StepReduction) -> Tensor:
        """Wait for the losses of an evaluation, keep their means, and return them."""
        losses = agreement.wait()
        self.evaluation = agreement.means()
        return losses

    def gradients(self) -> dict[int, dict[str, Tensor]]:
        """This process's gradients, by stage and by parameter name within the stage."""
        return {
            index: {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            for index, module in self.modules.items()
        }

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """The state of this process's modules, by stage and by name within the stage."""
        return {index: module.state_dict() for index, module in self.modules.items()}
