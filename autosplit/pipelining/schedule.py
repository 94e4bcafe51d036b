"""Schedules of ours on torch's runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.sharding import without_sharding
from autosplit.pipeline.validation.validate import validate
from autosplit.torch_internals.pipelining.schedules import runtime_of
from autosplit.torch_internals.pipelining.versions import check_names


def torch_schedule(
    schedule: Schedule,
    stages: Sequence[Any],
    loss_fn: Callable[..., Tensor] | None = None,
    **options: Any,
) -> Any:
    """A schedule of ours as one of torch.distributed.pipelining, which its runtime executes.

    Args:
        schedule: any that has one copy of its stages: built, searched, read, or that a trainer with
            ``schedule="auto"`` found.
        stages: the stages that this rank holds, ``SplitPipelineStage`` or torch's own.
        loss_fn: ``loss_fn(output, target)``.
        options: of torch's schedules: ``scale_grads``, ``args_chunk_spec``, ``kwargs_chunk_spec``,
            ``output_merge_spec``.

    Returns:
        A schedule with ``step`` and ``eval``.

    Raises:
        ScheduleError: torch's runtime cannot execute the schedule, or this rank holds other stages
            than were given.
        PipelineError: torch's runtime is not as in the supported versions.
    """
    check_names()
    validate(schedule)
    if schedule.mirror is not None:
        raise ScheduleError(
            f"{schedule.name!r} runs two copies of its stages, and torch's runtime has one rank a "
            "stage: take a schedule with one copy, such as 'dualpipe-v', or run it with "
            "autosplit.pipeline.PipelineTrainer"
        )
    _check_stages(schedule, stages)
    # Torch's runtime gathers and frees by itself.
    rows = [[str(action) for action in row] for row in without_sharding(schedule).ranks]
    return runtime_of(schedule.name, rows, stages, schedule.microbatches, loss_fn, options)


def _check_stages(schedule: Schedule, stages: Sequence[Any]) -> None:
    if not stages:
        raise ScheduleError(
            f"{schedule.name!r}: give the stages of this rank, at least one; a rank without a "
            "stage has no part in a pipeline"
        )
    first = stages[0]
    if (first.num_stages, first.group_size) != (schedule.stages, len(schedule.ranks)):
        raise ScheduleError(
            f"{schedule.name!r} has {schedule.stages} stages on {len(schedule.ranks)} ranks; the "
            f"stages are {first.num_stages} on {first.group_size}"
        )
    expected = schedule.held(first.group_rank)
    held = tuple(sorted(stage.stage_index for stage in stages))
    if held != expected:
        raise ScheduleError(
            f"{schedule.name!r} has stages {list(expected)} on rank {first.group_rank}, which was "
            f"given {list(held)}"
        )
