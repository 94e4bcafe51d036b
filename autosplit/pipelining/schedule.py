"""Schedules of ours on torch's runtime.

``dw_builder``: W of a split module, for those who keep torch's own ``PipelineStage``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from autosplit.errors import PipelineError, ScheduleError
from autosplit.module import SplitModule
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.validation.torch_csv import check_memory
from autosplit.pipeline.validation.validate import validate
from autosplit.torch_internals.distributed import fsdp_part
from autosplit.torch_internals.pipelining_schedules import forget_shapes, runtime_of


def torch_schedule(
    schedule: Schedule,
    stages: Sequence[Any],
    loss_fn: Callable[..., Tensor] | None = None,
    **options: Any,
) -> Any:
    """A schedule of ours as one of torch.distributed.pipelining, which its runtime executes.

    Args:
        schedule: any: built, searched, read, or that a trainer with
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
    """
    validate(schedule)
    check_memory(schedule)
    rows = [[*map(str, row)] for row in schedule.ranks]
    _check_stages(schedule, stages)
    return runtime_of(schedule.name, rows, stages, schedule.microbatches, loss_fn, options)


def reset_shapes(schedule: Any) -> None:
    """Let the next step of a schedule of torch's have batches of another size: its stages agree on
    shapes anew. To be called on every rank of the pipeline, between two steps.
    """
    forget_shapes(schedule)


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


def dw_builder(module: SplitModule) -> Callable[[], Callable[[], None]]:
    """W for ``PipelineStage(module, ..., dw_builder=dw_builder(module))`` around a split module.

    Every W, and every B after its I, computes the weight gradients of the oldest microbatch that
    waits. Torch does not say whose W it wants: where a schedule runs Ws in another order than Is,
    sums are made in the order of the Is. What has nothing waiting, because the module is
    frozen or hooks had the gradients computed at once, computes nothing.

    Args:
        module: what ``autosplit.split`` returned, the stage's module itself. Its ``max_pending`` is
            lifted: the schedule says how many wait.

    Raises:
        PipelineError: it is no split module, or is sharded.
    """
    if not isinstance(module, SplitModule):
        raise PipelineError(
            f"dw_builder takes the split module of a stage, got {type(module).__name__}: split the "
            "stage's module first, module = autosplit.split(module)"
        )

    if fsdp_part(module.unsplit) is not None:
        raise PipelineError(
            "dw_builder: torch's stage takes the weight gradients of a module that fully_shard has "
            "sharded out of autograd, where those of a split module are not. Give the module "
            "itself, split or not, to autosplit.pipelining.SplitPipelineStage"
        )

    module.max_pending = math.inf

    def run() -> None:
        if module.pending:
            module.backward_weight(1)

    return lambda: run
