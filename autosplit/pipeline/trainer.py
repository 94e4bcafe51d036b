"""Trains a model that is cut into stages, over any number of processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autosplit.errors import PipelineError
from autosplit.mesh.collective_costs import Overlap
from autosplit.pipeline.builders.schedule_request import AUTO, ScheduleRequest
from autosplit.pipeline.engine.stages import SplitStage, StageFactory
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.training.memory.rank_ledger import Record
from autosplit.pipeline.training.options import TrainerOptions, schedule_request, stage_factory_of
from autosplit.pipeline.training.stage_modules import (
    LossFunction,
    Partitioned,
    StageList,
    StageSource,
)
from autosplit.pipeline.training.stage_trainer import OptimizerFunction, StageTrainer
from autosplit.pipeline.training.state.tied_parameters import Holder
from autosplit.pipeline.training.training_setup import TrainingSetup
from autosplit.runtime.split_options import SplitOptions
from autosplit.text.byte_sizes import parse_size

Model: TypeAlias = "StageList | nn.Module"
Example: TypeAlias = "Tensor | Sequence[Tensor] | Mapping[str, Tensor]"
"""Example inputs of a whole model: one tensor, several, or keyword arguments by name."""


class PipelineTrainer(StageTrainer):
    """Trains a pipeline of stages: one process per stage, or several stages per process.

    Every process makes the same calls. Start them with torchrun or ``autosplit.pipeline.launch``.
    A batch that one rank refuses all refuse (``BatchError``). Whatever else goes wrong on one rank
    ends the trainer on all of them, with the first cause as message; a new trainer must then be
    built.

    Under a schedule with two copies of the stages (``"chimera"``, ``"dualpipe"``), two ranks hold
    each stage and half of the microbatches go each way. The copies start with the parameters and
    buffers of the first; every rank that holds the first or the last stage needs the batch, the
    same on all. Losses are bit for bit those of a schedule with one copy on the same weights. Each
    copy adds up the gradients of its own microbatches, then both get the sum of the two: another
    order of summation than with one copy, so gradients differ by its rounding (not with two
    microbatches), but they are the same bit for bit on both ranks and from run to run. Optimizers
    must do the same with the same gradients, so none may draw random numbers. No buffer may be
    written, and random layers draw from the generator of their rank: seed ranks differently.

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
        planning: further options of ``autosplit.partition`` for a whole model, such as ``{"costs":
            "estimate", "limits": Limits(cap=8e9)}``; what the trainer knows, it hands on itself.
        schedule: a name from ``autosplit.pipeline.SCHEDULES``, a Schedule, or ``"auto"``:
            measure the first three steps and run the shortest schedule that ``search`` finds for
            them from then on, on the same placement and within the memory of the split schedule
            that they ran.
        microbatches: M, into how many equal parts a batch is cut along dimension 0.
        split_backward: run input and weight gradients as separate actions.
        weights: where the weight gradients go, see ``schedules.build``.
        early_weights: run the next weight gradients wherever a rank would wait for a message,
            rather than where the schedule has them; the results are the same, bit for bit. Only
            on the CPU: on a GPU, the host does not know when the device waits.
        slices: into how many parts of near-equal FLOPs a weight gradient may be cut: with
            ``early_weights`` so that it fits a wait shorter than the whole, with replicas so that
            the first gradients are reduced while others are made. None: one, but with replicas as
            many as the gradients of the stage whose W ends a rank's step have buckets, up to 8.
        shapes: how many shapes the batches may have, such as a shorter last batch or several
            sequence lengths; None for any number. From the second on the graphs of stages hold for
            any size, see ``autosplit.Stage``. A whole model is cut for one shape, and
            ``memory_limit`` is for one. With 1, ranks need not tell each other the shape.
        autocast: ``torch.bfloat16`` runs modules and loss under autocast.
        max_grad_norm: clips the norm of the whole model's gradient to this.
        undo_steps: if an optimizer fails in ``step``, take the step back on every rank. Keeps a
            copy of parameters and optimizer state while the optimizers move.
        shared_parameters: groups of (stage, name) that are one parameter of the model. They start
            with the values of the first holder, and each gets the sum of the gradients. Those that
            modules of a list, or a model that is cut, have in common are found.
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
            ``mesh["tp"]``; the ranks along it are given the same batch.
        bucket_cap_mb: MiB of gradients that replicas reduce at once. A bucket is under way as soon
            as its gradients are there, beside the weight gradients that remain.
        timeout: seconds to wait for another rank, and for each stage to be built.
        memory_limit: bytes, or text such as ``"12GiB"``, that no rank may hold more than, of
            parameters, gradients, optimizer state, microbatches and what calls need. On the
            placement of ``schedule``, the shortest step within it is searched: before the first
            step by what graphs and messages hold, and after three steps by their times and with
            what operators were measured to take besides. Later steps are measured until one keeps
            the limit; where none does, a PipelineError says the least limit that was found to do.
            The first steps may hold more. It may keep microbatches at a partner rank, in the host's
            store, or run forwards again.
        store: the folder of the file in which stages on the CPU keep what the schedule offloads;
            None means that of temporary files. The file has no name there and ends with the
            process. On a GPU it is pinned memory.
        record: what to record of each step; may be changed between steps. True: when what ran,
            for ``timeline``. ``"memory"``: what each rank holds as well, for ``memory``; on the
            CPU by torch's profiler, which makes such a step slower and cannot run twice at once.
        backend: how stages are compiled, see ``autosplit.Stage``; None means ``"eager"``.
        memory: what a microbatch holds, see ``autosplit.split``; None means ``"balanced"``.
        accumulation: how weight gradients of microbatches are added up, see ``autosplit.Stage``;
            None means ``"exact"``. ``"concatenated"`` makes one call of those Ws of a stage that
            the schedule has next to each other on a rank.
        grad_dtype: in which dtype they are, see ``autosplit.Stage``; None means each parameter's.
        overlap: what weight gradients hide in stages whose tensors ranks share, see
            ``autosplit.split``; None means ``"collectives"``. The same on all ranks.
        stage_factory: makes stages in place of ``autosplit.Stage``.

    Raises:
        PipelineError: no process group, a count that does not fit, or any other bad argument.
        ScheduleError: an unknown schedule or placement of weight gradients, or an illegal schedule.
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
        planning: Mapping[str, Any] | None = None,
        schedule: str | Schedule = "1f1b",
        split_backward: bool = True,
        weights: str | None = None,
        early_weights: bool = False,
        slices: int | None = None,
        shapes: int | None = None,
        autocast: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        undo_steps: bool = False,
        shared_parameters: Sequence[Sequence[Holder]] = (),
        device: torch.device | str | None = None,
        ranks: int | None = None,
        mesh: DeviceMesh | None = None,
        bucket_cap_mb: float = 25.0,
        timeout: float = 300.0,
        memory_limit: int | str | None = None,
        store: str | os.PathLike[str] | None = None,
        record: Record = False,
        backend: str | None = None,
        memory: str | int | None = None,
        accumulation: str | None = None,
        grad_dtype: torch.dtype | None = None,
        overlap: Overlap | None = None,
        stage_factory: StageFactory | None = None,
    ) -> None:
        factory = stage_factory_of(
            stage_factory,
            backend=backend,
            memory=memory,
            accumulation=accumulation,
            grad_dtype=grad_dtype,
            overlap=overlap,
            slices=slices,
        )
        options = TrainerOptions(
            schedule_request(schedule, microbatches, ranks, split_backward, weights),
            factory,
            early_weights=early_weights,
            shapes=shapes,
            autocast=autocast,
            max_grad_norm=max_grad_norm,
            undo_steps=undo_steps,
            timeout=timeout,
            store=store,
            mesh=mesh,
            bucket_cap_mb=bucket_cap_mb,
            slices_are_given=slices is not None,
            memory_limit=(
                None
                if memory_limit is None
                else parse_size(memory_limit, "memory_limit", PipelineError)
            ),
        )
        if _is_whole(model):
            setup = _cut(model, stages, example, planning, loss_fn, options)
        else:
            _refuse_beside_stages(model, example=example, planning=planning)
            setup = TrainingSetup.of(StageSource.of(model, stages), loss_fn, options)
        super().__init__(
            setup,
            optimizer_fn,
            options,
            shared_parameters=shared_parameters,
            device=device,
            record=record,
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
    planning: Mapping[str, Any] | None,
    loss_fn: LossFunction,
    options: TrainerOptions,
) -> TrainingSetup:
    """Cut a whole model into stages for what they are to run.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: it cannot be cut so; says why.
    """
    # Training stages that are there needs no planner, which takes long to import.
    from autosplit.planner.cuts.cut_model import Planning, cut_model

    if count is None or example is None:
        raise PipelineError(
            f"a {type(model).__name__} is one module, to be cut into stages: say how many, "
            "stages=N, and give the inputs of one microbatch as example=...; a module whose "
            "children are the stages is given as a list, [*module]"
        )
    how = Planning.of(planning or {})
    request = options.schedule
    built = options.schedule_for(count, len(options.layout(count).pipeline))
    if options.shapes is not None and options.shapes > 1:
        raise PipelineError(
            f"shapes={options.shapes} has no effect on a whole model, which is cut for batches of "
            "one shape: pad the others to it, or give stages"
        )
    factory = options.factory
    found = cut_model(
        model,
        example,
        None,
        count,
        _planned_for(request, built),
        how,
        split=factory.split if isinstance(factory, SplitStage) else SplitOptions(),
        autocast=options.autocast,
        loss_fn=loss_fn,
    )
    partition = found.partition()
    stages = StageSource(count, partition.build, partition.wiring, partition.shared, cut=True)
    schedule = found.solution.schedule if built.mirror is None else built
    return TrainingSetup.of(stages, loss_fn, options, schedule)


def _planned_for(request: ScheduleRequest, built: Schedule) -> ScheduleRequest:
    """What stages are cut for: a schedule by name is built anew for their times.

    For two copies of the stages nothing is planned: they want equal stages, as 1F1B does.

    Args:
        request: what the user asked for.
        built: the schedule before it is known what stages take.
    """
    ranks = len(built.ranks)
    if built.mirror is not None:
        split = request.split_backward
        return ScheduleRequest("1f1b", request.microbatches, ranks, split_backward=split)
    if request.name == AUTO:
        return ScheduleRequest(built, request.microbatches, ranks)
    return replace(request, ranks=ranks)
