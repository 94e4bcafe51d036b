"""``torch_schedule`` runs schedules of autosplit on the runtime of torch.distributed.pipelining.
``dw_builder`` is the W of a split module in torch's own ``PipelineStage``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from autosplit.errors import PipelineError, ScheduleError
from autosplit.module import SplitModule
from autosplit.pipeline.schedule.schedule import SHARDING, Schedule
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
    """Convert a schedule to a schedule of torch.distributed.pipelining, which torch's runtime
    executes.

    Args:
        schedule: any schedule: built, searched, read from a file, or found by a trainer with
            ``schedule="auto"``.
        stages: this rank's stages, ``SplitPipelineStage`` or torch's own.
        loss_fn: ``loss_fn(output, target)``.
        options: options of torch's schedules: ``scale_grads``, ``args_chunk_spec``,
            ``kwargs_chunk_spec``, ``output_merge_spec``.

    Returns:
        A schedule with ``step`` and ``eval``.

    Raises:
        ScheduleError: torch's runtime cannot execute the schedule, or ``stages`` are not this
            rank's stages.
    """
    validate(schedule)
    check_memory(schedule)
    # Torch's runtime adds its own.
    rows = [
        [str(action) for action in row if action.kind not in SHARDING] for row in schedule.ranks
    ]
    _check_stages(schedule, stages)
    return runtime_of(schedule.name, rows, stages, schedule.microbatches, loss_fn, options)


def reset_shapes(schedule: Any) -> None:
    """Make the stages of a torch schedule agree on shapes again, for batches of another size.

    Call it on every rank of the pipeline, between two steps.
    """
    forget_shapes(schedule)


def _check_stages(schedule: Schedule, stages: Sequence[Any]) -> None:
    if not stages:
        raise ScheduleError(
            f"{schedule.name!r}: stages= is empty; pass this rank's stages, at least one. A rank "
            "without a stage takes no part in a pipeline"
        )
    first = stages[0]
    if (first.num_stages, first.group_size) != (schedule.stages, len(schedule.ranks)):
        raise ScheduleError(
            f"{schedule.name!r} has {schedule.stages} stages on {len(schedule.ranks)} ranks, but "
            f"this pipeline has {first.num_stages} stages on {first.group_size} ranks: build the "
            "schedule for these numbers"
        )
    expected = schedule.stages_on(first.group_rank)
    indices = tuple(sorted(stage.stage_index for stage in stages))
    if indices != expected:
        raise ScheduleError(
            f"{schedule.name!r} has stages {list(expected)} on rank {first.group_rank}, but "
            f"got stages {list(indices)}: construct stages {list(expected)} on this rank"
        )


def dw_builder(module: SplitModule) -> Callable[[], Callable[[], None]]:
    """Return W of a split module, for ``PipelineStage(module, ...,
    dw_builder=dw_builder(module))``.

    Every W, and every B after its I, computes the weight gradients of the oldest pending
    microbatch. Torch does not say which microbatch a W is for. So if a schedule runs Ws in another
    order than Is, gradients are summed in the order of the Is. If no microbatch is pending, because
    the module is frozen or hooks had the gradients computed at once, W computes nothing.

    Args:
        module: the stage's module, as ``autosplit.split`` returned it. Its ``max_pending`` becomes
            infinite, because the schedule bounds the pending microbatches.

    Raises:
        PipelineError: the module is not a split module, or is sharded.
    """
    if not isinstance(module, SplitModule):
        raise PipelineError(
            f"dw_builder takes the split module of a stage, got {type(module).__name__}. Split the "
            "stage's module first: module = autosplit.split(module)"
        )

    if fsdp_part(module.unsplit) is not None:
        raise PipelineError(
            "dw_builder: fully_shard has sharded the module. Torch's stage takes weight gradients "
            "of a sharded module from autograd, but a split module computes them outside of "
            "autograd. Pass the module, split or not, to autosplit.pipelining.SplitPipelineStage"
        )

    module.max_pending = math.inf

    def run() -> None:
        if module.pending:
            module.backward_weight(1)

    return lambda: run
