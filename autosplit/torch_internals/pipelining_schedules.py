"""What a stage learns of the torch.distributed.pipelining schedule that runs it, and schedules made
for torch's runtime.
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
    """What a stage can learn of the schedule that runs it.

    Attributes:
        name: its class.
        single: whether it holds one stage a rank.
        stages: this rank's stages.
        placement: stage -> rank.
        scales: whether gradients are divided by the number of microbatches.
        microbatches: how many there are.
        rows: per rank its actions as text, computations only; empty where there is no list.
        reduces: the stages whose gradients the schedule has divided itself.
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
    """The schedule whose ``step`` or ``eval`` calls this; None where there is none. Torch does not
    tell its stages.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, schedules._PipelineSchedule):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def install_runner(schedule: Any, make: Callable[[Any, Callable[..., Any]], R]) -> R:
    """What runs the microbatches of a schedule's steps, that which calls this included, in the
    place of its own method: made once, of the schedule and of that method.
    """
    runner: R = vars(schedule).get("_step_microbatches") or make(
        schedule, type(schedule)._step_microbatches
    )
    schedule._step_microbatches = runner
    return runner


def reduces_gradients(schedule: Any) -> bool:
    """Whether the step that runs reduces gradients of sharded parameters; False where its caller
    has put that off, which can be from torch 2.15 on.
    """
    return getattr(schedule, "_finalize_gradients", True)


def called_by_compile_check() -> bool:
    """Whether the caller's caller is the check by which zero-bubble schedules refuse modules of
    ``torch.compile``, whose backward torch's own stage cannot split.
    """
    check = getattr(schedules, "_check_torch_compile_compatibility", None)
    return sys._getframe(2).f_code is getattr(check, "__code__", None)


def forget_shapes(schedule: Any) -> None:
    """Have a schedule initialise its stages anew in its next step."""
    for name in vars(schedule):
        if name.startswith("_stage") and name.endswith("_initialized"):
            setattr(schedule, name, False)


def action_lists(schedule: Any) -> Any:
    """The object that holds a schedule's actions: another one once they were exchanged."""
    listed = getattr(schedule, "pipeline_order_with_comms", None)
    return schedule.pipeline_order if listed is None else listed


def describe_schedule(schedule: Any) -> RunningSchedule:
    """What there is to know of a schedule of torch's."""
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
    """Torch's runtime with these computations, per rank; it adds sends and receives."""
    kind = type(name, (schedules._PipelineScheduleRuntime,), {})
    schedule = kind(list(stages), microbatches, loss_fn=loss_fn, **options)
    parse = schedules._Action.from_str
    schedule.pipeline_order = {rank: [*map(parse, row)] for rank, row in enumerate(rows)}
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule


def _computations(actions: Iterable[Any]) -> Iterable[Any]:
    """F, I, W and B of a row, those inside of others too."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _computations(action.sub_actions)
        elif action.is_compute_op:
            yield action
