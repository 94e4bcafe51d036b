"""Trains a model that is cut into stages, over any number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autosplit.errors import PipelineError, ShardedError
from autosplit.pipeline.builders.schedule_request import AUTO, ScheduleRequest
from autosplit.pipeline.engine.stages import SplitStage
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.training.options import (
    RunOptions,
    StageOptions,
    TrainerOptions,
    asked,
)
from autosplit.pipeline.training.rank_state import OptimizerFunction
from autosplit.pipeline.training.stage_modules import (
    LossFunction,
    Partitioned,
    StageList,
    StageSource,
)
from autosplit.pipeline.training.stage_trainer import StageTrainer
from autosplit.runtime.split_options import SplitOptions
from autosplit.text.figures import parse_size

Model: TypeAlias = "StageList | nn.Module"
Example: TypeAlias = "Tensor | Sequence[Tensor] | Mapping[str, Tensor]"
"""Example inputs of a whole model: one tensor, several, or keyword arguments by name."""


class PipelineTrainer(StageTrainer):
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
            in buckets of 25 MiB, each under way as soon as its gradients are there, beside the
            weight gradients that remain.
        memory_limit: bytes, or text such as ``"12GiB"``, that no rank may hold more than, of
            parameters, gradients, optimizer state, microbatches and what calls need. On the
            placement of ``schedule``, the shortest step within it is searched: before the first
            step by what graphs and messages hold, and after three steps by their times and with
            what operators were measured to take besides. Later steps are measured until one keeps
            the limit; where none does, a PipelineError says the least limit that was found to do.
            The first steps may hold more. It may keep microbatches in the host's store, or run
            forwards again.
        stage_options: how stages are made.
        run_options: how steps run.

    Attributes:
        modules: this rank's stages by index, with their parameters.
        optimizer: what ``optimizer_fn`` made, for learning rate schedulers; None on a rank that has
            nothing to train.
        rank: this process's place in its pipeline, along ``"pp"`` of a mesh.
        mesh: as given.
        schedule: what steps run.
        grad_norm: of the whole model's gradient in the last step; None without ``max_grad_norm``.
        record: what is recorded of each step, as in ``RunOptions``; may be set between steps.

    Raises:
        PipelineError: no process group, a count that does not fit, or any other bad argument.
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
        if _is_whole(model):
            source, planned = _cut(model, stages, example, loss_fn, options)
        else:
            _refuse_beside_stages(model, example=example, planning=made.planning)
            source, planned = StageSource.of(model, stages), None
        super().__init__(source, loss_fn, optimizer_fn, options, planned, device=device)


def _check_function(name: str, given: object, example: str) -> None:
    if not callable(given):
        raise PipelineError(
            f"{name} is a function, such as {example}, which this process calls; "
            f"got a {type(given).__name__}"
        )


def _is_whole(model: Model) -> TypeGuard[nn.Module]:
    return isinstance(model, nn.Module) and not isinstance(model, (nn.ModuleList, Partitioned))


def _refuse_beside_stages(model: Model, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            what = "a model that is already cut" if isinstance(model, Partitioned) else "stages"
            raise PipelineError(f"{name} has no effect beside {what}; it is for a whole nn.Module")


def _cut(
    model: nn.Module,
    count: int | None,
    example: Example | None,
    loss_fn: LossFunction,
    options: TrainerOptions,
) -> tuple[StageSource, Schedule]:
    """Cut a whole model into stages for what they are to run: these, and that.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: it cannot be cut so; says why.
        ShardedError: its stages would have to be sharded.
    """
    # Training stages that are there needs no planner, which takes long to import.
    from autosplit.planner.costs import BlockOptions
    from autosplit.planner.cutting import Planning, cut_model
    from autosplit.planner.stages import cut

    if count is None or example is None:
        raise PipelineError(
            f"a {type(model).__name__} is one module, to be cut into stages: say how many, "
            "stages=N, and give the inputs of one microbatch as example=...; a module whose "
            "children are the stages is given as a list, [*module]"
        )
    if options.of_mesh is not None and options.of_mesh.shards > 1:
        raise ShardedError(
            "the mesh has 'dp_shard', and a whole model that is cut here is not sharded: give a "
            "function that builds stage number index and calls fully_shard(stage, "
            "mesh=mesh['dp_shard']), or take a mesh with 'dp_replicate' instead"
        )
    how = Planning.of(options.stages.planning or {})
    request = options.schedule
    built = options.schedule_for(count, len(options.layout(count).pipeline))
    factory = options.factory(cut=True)
    split = factory.split if isinstance(factory, SplitStage) else SplitOptions()
    whole, found = cut_model(
        model,
        example,
        None,
        count,
        _planned_for(request, built),
        how,
        BlockOptions(split, options.stages.autocast, loss_fn),
    )
    parts = cut(whole, found.firsts)
    stages = StageSource(count, parts.build, parts.wiring, parts.shared, cut=True)
    return stages, found.schedule


def _planned_for(request: ScheduleRequest, built: Schedule) -> ScheduleRequest:
    """What stages are cut for: a schedule by name is built anew for their times.

    Args:
        request: what the user asked for.
        built: the schedule before it is known what stages take.
    """
    ranks = len(built.ranks)
    if request.name == AUTO:
        return ScheduleRequest(built, request.microbatches, ranks)
    return replace(request, ranks=ranks)
