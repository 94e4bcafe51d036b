"""A whole model given to a trainer: cut into stages for what they are to run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeGuard

from torch import Tensor, nn

from autosplit.errors import PipelineError, ShardedError
from autosplit.pipeline.builders.build import AUTO, ScheduleRequest
from autosplit.pipeline.engine.stage_builder import SplitStage
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.runtime.build import SplitOptions
from autosplit.trainer.options import TrainerOptions
from autosplit.trainer.stage_modules import (
    Partitioned,
    StageList,
    StageSource,
)

Model: TypeAlias = "StageList | nn.Module"
Example: TypeAlias = "Tensor | Sequence[Tensor] | Mapping[str, Tensor]"
"""Example inputs of a whole model: one tensor, several, or keyword arguments by name."""


def is_whole(model: Model) -> TypeGuard[nn.Module]:
    """Whether a trainer has to cut it."""
    return isinstance(model, nn.Module) and not isinstance(model, (nn.ModuleList, Partitioned))


def refuse_beside_stages(model: Model, **options: object) -> None:
    """Refuse options that are for a whole model.

    Raises:
        PipelineError: names one.
    """
    for name, value in options.items():
        if value is not None:
            what = "a model that is already cut" if isinstance(model, Partitioned) else "stages"
            raise PipelineError(f"{name} has no effect beside {what}; it is for a whole nn.Module")


def cut(
    model: nn.Module,
    count: int | None,
    example: Example | None,
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
    from autosplit.planner.cutting import PLANNING, Partition, cut_model

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
    planning = options.stages.planning or {}
    if unknown := [name for name in planning if name not in PLANNING]:
        raise PipelineError(
            f"unknown option {unknown[0]!r} in planning; known: {', '.join(PLANNING)} (the rest "
            "of what autosplit.partition takes, the trainer tells it)"
        )
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
        BlockOptions(split, options.stages.autocast),
        cap=math.inf if options.memory_limit is None else float(options.memory_limit),
        **planning,
    )
    parts = Partition(whole, found.firsts)
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
