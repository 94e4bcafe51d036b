"""A whole model captured, measured and cut for a schedule. All ranks measure at once, with the same
result on each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autosplit.errors import AutosplitError, PipelineError, PlanError
from autosplit.mesh.costs import device_of_group
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.engine.default_group import gather
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.timing import measure_transfer, ring
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.pipeline.training.batches import Part
from autosplit.pipeline.training.stage_modules import LossFunction
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import Limits, ModelCosts, average
from autosplit.planner.cuts import CapError, Solution, solve, weigh
from autosplit.planner.estimate import estimate
from autosplit.planner.profile import BlockOptions, profile
from autosplit.planner.stages import cut
from autosplit.runtime.split_options import SplitOptions
from autosplit.text.progress import working

COSTS = ("profile", "estimate")
_DAY = 86_400
_TIMEOUT = 60.0

T = TypeVar("T")


def check_seconds(seconds: float) -> None:
    """Refuse what is no time to measure for.

    Raises:
        PlanError: negative, not finite, or more than a day.
    """
    if not 0.0 <= seconds <= _DAY:
        raise PlanError(
            f"seconds to measure for must be from 0 to {_DAY:,} (a day), got {seconds!r}"
        )


@dataclass(frozen=True)
class Planning:
    """How a model's cuts are found; ``autosplit.partition`` says what each means.

    Raises:
        PlanError: unknown costs, or seconds that are none.
    """

    costs: str | ModelCosts = "profile"
    seconds: float = 10.0
    targets: Part | None = None
    limits: Limits = field(default_factory=Limits)
    cut_at: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_seconds(self.seconds)
        if not isinstance(self.costs, ModelCosts) and self.costs not in COSTS:
            known = ", ".join(COSTS)
            raise PlanError(f"unknown costs {self.costs!r}; known: {known}, or a ModelCosts")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Planning:
        """What a trainer's user says of it.

        Raises:
            PipelineError: an unknown option.
        """
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                raise PipelineError(
                    f"unknown option {name!r} in planning; known: {', '.join(known)} (the rest "
                    "of what autosplit.partition takes, the trainer tells it)"
                )
        return cls(**options)


def _find(
    costs: ModelCosts,
    stages: int,
    firsts: Sequence[int] | None,
    schedule: ScheduleRequest,
    limits: Limits,
) -> Solution:
    """The best stages for some costs.

    Args:
        costs: of the model's blocks.
        stages: how many.
        firsts: the first blocks of all stages but the first; None: where the step is shortest.
        schedule: what they are to run.
        limits: memory of a rank and links.

    Raises:
        CapError: nothing fits; says the least cap that would do. Where a trainer is to take
            measures, the shortest step is found.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    try:
        if firsts is None:
            with working(f"searching where to cut into {stages} stages"):
                return solve(costs, stages, schedule, limits=limits)
        return _fitting(weigh(costs, firsts, schedule, limits), limits)
    except CapError:
        if not limits.measures:
            raise
        return _find(costs, stages, firsts, schedule, replace(limits, cap=math.inf, measures=False))


def _fitting(found: Solution, limits: Limits) -> Solution:
    least = max(found.peaks)
    if least > limits.cap * (1 + 1e-9):
        raise CapError(
            f"the stages that cut_at gives do not fit under a cap of {limits.cap:,.0f} bytes a "
            f"rank; the least cap for them is {least:,.0f}: raise the cap, cut elsewhere, or leave "
            "cut_at out",
            least,
        )
    return found


def cut_model(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    stages: int,
    schedule: ScheduleRequest,
    planning: Planning,
    *,
    split: SplitOptions,
    autocast: torch.dtype | None,
    loss_fn: LossFunction | None,
) -> tuple[WholeModel, Solution]:
    """Cut a model into stages, so that a step of a schedule is short; see ``partition``.

    Args:
        model: what to cut.
        args: example positional inputs of one microbatch.
        kwargs: example keyword inputs.
        stages: how many stages.
        schedule: what they are to run.
        planning: how cuts are found.
        split: how stages are split.
        autocast: the dtype of autocast, or None.
        loss_fn: counts in the last stage where there are targets.

    Returns:
        the model, and the best cuts of it that were found with the schedule that they are for.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: it cannot be cut so; says why.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    stages = stage_count(stages, planning.cut_at)
    whole = WholeModel.capture(model, args, kwargs)
    firsts = None
    if planning.cut_at is not None:
        whole = whole.divided(planning.cut_at)
        firsts = [whole.start(name) for name in planning.cut_at]
        cut(whole, firsts)  # refuses what is no cut, before anything is measured
    whole.check_stages(stages)
    alone = schedule.ranks == 1  # this process plans for itself, whatever group it is in
    options = BlockOptions(
        split,
        autocast=autocast,
        loss_fn=None if planning.targets is None else loss_fn,
        targets=planning.targets,
        device=device_of_trainer(alone=alone),
    )
    costs = _costs(planning, whole, options, alone=alone)
    find = partial(_find, costs, stages, firsts, schedule, planning.limits)
    return whole, find() if alone else agreed(find)


def stage_count(stages: int | None, cut_at: Sequence[str] | None) -> int:
    """How many stages are asked for.

    Raises:
        PlanError: nothing says it, or two things say different.
    """
    if cut_at is None:
        if stages is None:
            raise PlanError("say how many stages: stages=N, or where they begin: cut_at=[...]")
        return stages
    if stages not in (None, len(cut_at) + 1):
        raise PlanError(
            f"cut_at has {len(cut_at)} names, which gives {len(cut_at) + 1} stages, but "
            f"stages={stages}"
        )
    return len(cut_at) + 1


def _costs(
    planning: Planning, whole: WholeModel, options: BlockOptions, *, alone: bool
) -> ModelCosts:
    """What the blocks cost: measured, estimated, or as given."""
    if isinstance(planning.costs, ModelCosts):
        given = len(planning.costs.blocks)
        if given != len(whole.blocks):
            raise PlanError(
                f"costs of {given} blocks were given, and the model has {len(whole.blocks)}: give "
                "those of this model, or leave costs out"
            )
        return planning.costs
    if planning.costs == "profile":
        return profile_together(whole, options, planning.seconds, alone=alone)
    return estimate(whole, options)


def profile_together(
    whole: WholeModel, options: BlockOptions, seconds: float, *, alone: bool
) -> ModelCosts:
    """Profile on all ranks at once, for in a step they share memory and caches too; the mean. An
    error on one is an error on all.

    Args:
        whole: the model.
        options: how stages are made.
        seconds: how long to measure.
        alone: whether this process measures for itself, whatever group it is in.
    """
    with working(f"measuring {len(whole.blocks)} blocks"):
        if alone or not grouped():
            return profile(whole, options, seconds=seconds)
        return average(
            [*map(_value, gather(_outcome(lambda: profile(whole, options, seconds=seconds))))]
        )


def measure_links() -> Transfer:
    """The links of each rank to the next and from the last to the first, with the messages that a
    trainer's stages send.

    Collective over the default process group; all ranks get the same.

    Raises:
        PlanError: there is only one rank.
    """
    if dist.get_world_size() < 2:
        raise PlanError("a link joins two ranks, and the default process group has one")
    device = device_of_group()
    groups = Groups(dist.get_world_size(), device, _TIMEOUT)
    try:
        return measure_transfer(groups, device, ring(groups.ranks))
    finally:
        groups.destroy()


def agreed(find: Callable[[], T]) -> T:
    """What rank 0 of the default process group finds, on all of them.

    Each might find something else, and cut elsewhere.
    """
    if not grouped():
        return find()
    found: T = _value(gather(_outcome(find) if dist.get_rank() == 0 else None)[0])
    return found


def _outcome(find: Callable[[], T]) -> T | AutosplitError:
    try:
        return find()
    except AutosplitError as error:
        return error


def _value(outcome: Any) -> Any:
    if isinstance(outcome, AutosplitError):
        raise outcome
    return outcome


def grouped() -> bool:
    """Whether there are other ranks, in the default process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def device_of_trainer(*, alone: bool) -> torch.device | None:
    """Where a trainer puts its stages, if that is not where the model is.

    Args:
        alone: whether it has one process, whatever group that is in.
    """
    device = None if alone or not grouped() else device_of_group()
    return None if device is None or device.type == "cpu" else device
