"""Cut a whole model into stages for a trainer's schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeGuard

from torch import Tensor, nn

from autosplit.errors import PipelineError, ShardedError, with_code
from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.pipeline.engine.stage_factory import SplitStage
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.runtime.options import SplitOptions
from autosplit.trainer.default_shards import group_names
from autosplit.trainer.stage_modules import (
    Partitioned,
    StageList,
    StageSource,
)
from autosplit.trainer.trainer_options import TrainerOptions

Model: TypeAlias = "StageList | nn.Module"
Example: TypeAlias = "Tensor | Sequence[Tensor] | Mapping[str, Tensor]"
"""Example inputs of a whole model: one tensor, several, or keyword arguments by name."""


def is_whole(model: Model) -> TypeGuard[nn.Module]:
    """Whether a model is one whole module, which the trainer has to cut into stages."""
    return isinstance(model, nn.Module) and not isinstance(model, (nn.ModuleList, Partitioned))


def refuse_whole_model_options(model: Model, **options: object) -> None:
    """Refuse options for cutting a model, if the model is already cut into stages.

    Raises:
        PipelineError: names an option that is not None.
    """
    for name, value in options.items():
        if value is not None:
            kind = "a model that is already cut" if isinstance(model, Partitioned) else "stages"
            raise PipelineError(
                f"{name} has no effect with {kind}: it is for a whole nn.Module. Leave it out"
            )


def cut_whole_model(
    model: nn.Module,
    count: int | None,
    example: Example | None,
    options: TrainerOptions,
) -> tuple[StageSource, Schedule]:
    """Cut a whole model into stages.

    Args:
        model: the model.
        count: the number of stages.
        example: the inputs of one microbatch.
        options: the trainer's options.

    Returns:
        (source of the stages, schedule for which they were cut).

    Raises:
        PipelineError: ``count`` or ``example`` is missing, or an option of ``planning`` is unknown.
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: the model cannot be cut into ``count`` stages, or no forward leaves an auxiliary
            loss.
        ShardedError: the mesh has a dimension for experts.
    """
    # Only whole models need the planner, which takes long to import.
    from autosplit.planner.costs import BlockOptions
    from autosplit.planner.cutting import PLANNING, Partition, cut_model
    from autosplit.planner.precision import MixedPrecision

    if count is None or example is None:
        raise PipelineError(
            with_code(
                f"a {type(model).__name__} is one module, which the trainer cuts into stages: pass "
                "their number and the inputs of one microbatch. If the module's children are the "
                "stages, pass them as a list, [*model]",
                wrong="PipelineTrainer(model, loss_fn, optimizer_fn, microbatches=4)",
                right="PipelineTrainer(model, loss_fn, optimizer_fn, microbatches=4,\n"
                "                stages=2, example=inputs[: len(inputs) // 4])",
            )
        )
    if options.mesh_layout is not None and options.mesh_layout.experts:
        raise ShardedError(
            "the mesh has 'ep', but the trainer does not cut a model with experts: pass a function "
            "build(index) that builds a stage with its experts and shards the stage along 'efsdp'"
        )
    planning = options.stages.planning or {}
    if unknown := [name for name in planning if name not in PLANNING]:
        raise PipelineError(
            f"unknown option {unknown[0]!r} in planning; known: {', '.join(PLANNING)} (the "
            "trainer sets the other arguments of autosplit.partition)"
        )
    request = options.schedule
    first = options.schedule_for(count, len(options.layout(count).pipeline))
    factory = options.factory(cut=True)
    split = factory.options if isinstance(factory, SplitStage) else SplitOptions()
    sharding = options.stages.sharding
    groups = group_names(model, sharding.get("groups")) if options.shards else ()
    whole, solution = cut_model(
        model,
        example,
        None,
        count,
        _request_for_cut(request, first),
        BlockOptions(split, options.stages.autocast),
        memory_limit=options.limits(len(first.ranks)) or math.inf,
        precision=MixedPrecision(sharding.get("mp_policy"), groups),
        aux_losses=options.stages.aux_losses,
        alone=options.mesh_layout is None and len(first.ranks) == 1,
        **planning,
    )
    parts = Partition(whole, solution.firsts)
    again = {"cut_at": [*parts.cuts], "costs": solution.blocks.plain}
    stages = StageSource(
        count,
        parts.build,
        parts.wiring,
        parts.shared,
        planning=again,
        groups=groups,
        model=model,
        boundaries=parts.boundaries,
    )
    return stages, solution.schedule


def _request_for_cut(request: ScheduleRequest, first: Schedule) -> ScheduleRequest:
    """Return the schedule request with which the planner cuts the stages. For a named schedule, the
    planner builds the schedule again for the stages' times.

    Args:
        request: the user's request.
        first: the schedule for usual times.
    """
    ranks = len(first.ranks)
    if request.searches:
        return ScheduleRequest(first, request.microbatches, ranks)
    return replace(request, ranks=ranks)
