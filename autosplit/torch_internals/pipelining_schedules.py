"""Read, create and change schedules of torch.distributed.pipelining.

``runtime_of`` creates schedules for torch's runtime.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch.distributed.pipelining import schedules

R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class RunningSchedule:
    """Properties of the schedule that runs a stage.

    Attributes:
        name: name of the schedule's class.
        single: whether the schedule's class allows only one stage for each rank.
        stages: this rank's stages.
        placement: stage -> rank.
        scales: the schedule's option ``scale_grads``: whether gradients are divided by the number
            of microbatches.
        microbatches: the number of microbatches.
        rows: the computations of each rank as text; empty if the schedule has no list of actions.
        reduces: this rank's stages whose gradients torch's runtime scales. It does not scale the
            others, whose list of actions lacks REDUCE_GRAD.
    """

    name: str
    single: bool
    stages: Sequence[Any]
    placement: Mapping[int, int]
    scales: bool
    microbatches: int
    rows: Sequence[Sequence[str]]
    reduces: frozenset[int]


def running_schedule() -> Any:
    """The schedule whose ``step`` or ``eval`` is running; None if there is none.

    The schedule is found in the call stack, because torch gives stages no reference to it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, schedules._PipelineSchedule):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def install_runner(schedule: Any, make: Callable[[Any, Callable[..., Any]], R]) -> R:
    """Replace the method with which a schedule runs the microbatches of a step.

    Called at the start of a step, it takes effect in the same step. Later calls keep the first
    replacement.

    Args:
        schedule: the schedule.
        make: creates the replacement from the schedule and its original method.

    Returns:
        the replacement.
    """
    runner: R = vars(schedule).get("_step_microbatches") or make(
        schedule, type(schedule)._step_microbatches
    )
    schedule._step_microbatches = runner
    return runner


def reduces_gradients(schedule: Any) -> bool:
    """Whether the running step reduces gradients of sharded parameters.

    From torch 2.15 on, the caller of ``step`` may postpone the reduction to a later step.
    """
    return getattr(schedule, "_finalize_gradients", True)


def forget_shapes(schedule: Any) -> None:
    """Make a schedule initialize its stages again in its next step."""
    for name in vars(schedule):
        if name.startswith("_stage") and name.endswith("_initialized"):
            setattr(schedule, name, False)


def action_lists(schedule: Any) -> Any:
    """The dictionary of a schedule's actions by rank. Its identity changes when the actions are
    replaced.
    """
    listed = getattr(schedule, "pipeline_order_with_comms", None)
    return schedule.pipeline_order if listed is None else listed


def describe_schedule(schedule: Any) -> RunningSchedule:
    """Describe a schedule of torch.distributed.pipelining."""
    single = isinstance(schedule, schedules.PipelineScheduleSingle)
    stages = [schedule._stage] if single else list(schedule._stages)
    order = {} if single else schedule.pipeline_order
    listed = getattr(schedule, "pipeline_order_with_comms", None)
    reduces = frozenset(stage.stage_index for stage in stages)
    if listed is not None:
        order = order or listed
        actions = listed[stages[0].group_rank]
        divided = {a.stage_index for a in actions if a.computation_type.value == "REDUCE_GRAD"}
        reduces = frozenset(divided)
    return RunningSchedule(
        type(schedule).__name__,
        single,
        stages,
        stages[0].stage_index_to_group_rank,
        bool(schedule.scale_grads),
        schedule._n_microbatches,
        [[str(action) for action in _computations(order[rank])] for rank in sorted(order)],
        reduces,
    )


def runtime_of(
    name: str,
    rows: Sequence[Sequence[str]],
    stages: Sequence[Any],
    microbatches: int,
    loss_fn: Any,
    options: Mapping[str, Any],
) -> Any:
    """Create a schedule that torch's runtime runs. torch adds the sends and receives.

    Args:
        name: name of the schedule's class.
        rows: the computations of each rank as text.
        stages: this rank's stages.
        microbatches: the number of microbatches.
        loss_fn: the loss function, as for torch's schedules.
        options: further arguments of torch's schedules.
    """
    kind = type(name, (schedules._PipelineScheduleRuntime,), {})
    schedule = kind(list(stages), microbatches, loss_fn=loss_fn, **options)
    parse = schedules._Action.from_str
    schedule.pipeline_order = {rank: [*map(parse, row)] for rank, row in enumerate(rows)}
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule


def _computations(actions: Iterable[Any]) -> Iterable[Any]:
    """The actions F, I, W and B of a row, including the parts of torch's combined actions."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _computations(action.sub_actions)
        elif action.is_compute_op:
            yield action
