"""What a stage learns of the torch.distributed.pipelining schedule that runs it, and schedules made
for torch's runtime.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules

from autosplit.errors import PipelineError
from autosplit.torch_internals import version

SUPPORTED = ((2, 13), (2, 14))
"""Before them stages do not agree on shapes by these methods, after them they keep other state."""


def check_version() -> None:
    """Refuse a torch whose pipelining drives stages in another way than is written down here.

    Raises:
        PipelineError: names the supported versions.
    """
    if version.TORCH in SUPPORTED:
        return
    supported = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    raise PipelineError(
        f"torch {torch.__version__} drives pipeline stages in another way than those supported "
        f"here, torch {supported}. Install one of them; or keep torch's PipelineStage around "
        "autosplit.split(module) with dw_builder=autosplit.pipelining.dw_builder(module); or train "
        "with autosplit.pipeline.PipelineTrainer"
    )


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


def run_microbatches_by(
    schedule: Any, run: Callable[[Callable[[], Any], Callable[[], bool]], Any]
) -> None:
    """Have all steps of a schedule from now on, that which calls this included, run what they do
    with their microbatches by ``run(microbatches, is_told)``, see ``FirstFailure.run``. Once only:
    a schedule that has it keeps it.
    """
    if "_step_microbatches" in vars(schedule):
        return
    inner, owner = type(schedule)._step_microbatches, weakref.ref(schedule)

    def step_microbatches(*args: Any, **kwargs: Any) -> Any:
        mine = owner()

        def is_told() -> bool:
            return any(getattr(stage, "agreeing", False) for stage in stages_of(mine))

        return run(lambda: inner(mine, *args, **kwargs), is_told)

    schedule._step_microbatches = step_microbatches


def stages_of(schedule: Any) -> list[Any]:
    """This rank's stages."""
    single = isinstance(schedule, schedules.PipelineScheduleSingle)
    return [schedule._stage] if single else list(schedule._stages)


def given_microbatches() -> tuple[Sequence[Any], Sequence[Any]]:
    """Positional and keyword arguments of the microbatches of the step that calls this."""
    frame = sys._getframe(1)
    while frame is not None:
        known = frame.f_locals
        if frame.f_code.co_name == "_step_microbatches" and "arg_mbs" in known:
            return known["arg_mbs"] or (), known["kwarg_mbs"] or ()
        frame = frame.f_back  # type: ignore[assignment]
    return (), ()


def action_lists(schedule: Any) -> Any:
    """The object that holds a schedule's actions: another one once they were exchanged."""
    listed = getattr(schedule, "pipeline_order_with_comms", None)
    return schedule.pipeline_order if listed is None else listed


def described(schedule: Any) -> RunningSchedule:
    """What there is to know of a schedule of torch's."""
    single = isinstance(schedule, schedules.PipelineScheduleSingle)
    held = stages_of(schedule)
    order = {} if single else schedule.pipeline_order
    listed = getattr(schedule, "pipeline_order_with_comms", None)
    reduces = frozenset(stage.stage_index for stage in held)
    if listed is not None:
        order = order or listed
        actions = listed[held[0].group_rank]
        divided = {a.stage_index for a in actions if a.computation_type.value == "REDUCE_GRAD"}
        reduces = frozenset(divided)
    return RunningSchedule(
        type(schedule).__name__,
        single,
        held,
        held[0].stage_index_to_group_rank,
        bool(schedule.scale_grads),
        schedule._n_microbatches,
        [[str(each) for each in _computations(order[rank])] for rank in sorted(order)],
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
