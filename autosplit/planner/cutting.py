"""A whole model captured, measured and cut for a schedule. All ranks measure at once, and cut
alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autosplit.errors import AutosplitError, PipelineError, PlanError
from autosplit.mesh.costs import device_of_group
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.engine.default_group import gather
from autosplit.pipeline.training.batches import Part
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, ModelCosts, check_seconds, estimate, profile
from autosplit.planner.cuts import CapError, Limits, Solution, solve
from autosplit.planner.stages import cut
from autosplit.text.progress import working

COSTS = ("profile", "estimate")

T = TypeVar("T")


@dataclass(frozen=True)
class Planning:
    """How a model's cuts are found; ``autosplit.partition`` says what each means.

    Raises:
        PlanError: unknown costs, or seconds that are none.
    """

    costs: str | ModelCosts = "profile"
    seconds: float = 10.0
    targets: Part | None = None
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


def cut_model(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    stages: int | None,
    request: ScheduleRequest,
    planning: Planning,
    options: BlockOptions,
    cap: float = math.inf,
) -> tuple[WholeModel, Solution]:
    """Cut a model into stages, so that a step of a schedule is short; see ``partition``.

    Args:
        model: what to cut.
        args: example positional inputs of one microbatch.
        kwargs: example keyword inputs.
        stages: how many stages.
        request: the schedule that they are to run.
        planning: how cuts are found.
        options: how stages are made.
        cap: bytes that no rank shall hold more than, if there are such cuts.

    Returns:
        the model, and the best cuts of it that were found with the schedule that they are for.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: it cannot be cut so; says why.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    count = stage_count(stages, planning.cut_at)
    whole, firsts = WholeModel.capture(model, args, kwargs), None
    if planning.cut_at is not None:
        whole = whole.divided(planning.cut_at)
        firsts = [whole.start(name) for name in planning.cut_at]
        cut(whole, firsts)  # refuses what is no cut, before anything is measured
    if not 1 <= count <= len(whole.blocks):
        raise PlanError(
            f"{type(model).__name__} has blocks for 1 to {len(whole.blocks)} stages, got "
            f"stages={count}"
        )
    alone = request.ranks == 1  # this process plans for itself, whatever group it is in
    options = replace(options, targets=planning.targets, device=device_of_trainer(alone=alone))

    def find(costs: ModelCosts) -> Solution:
        with working(f"searching where to cut into {count} stages"):
            try:
                return solve(costs, count, request, limits=Limits(cap), firsts=firsts)
            except CapError:  # a trainer moves or makes again what is too much
                return solve(costs, count, request, firsts=firsts)

    found = on_all_ranks(lambda: _costs(planning, whole, options), find, alone=alone)
    return whole, found


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


def _costs(planning: Planning, whole: WholeModel, options: BlockOptions) -> ModelCosts:
    """What the blocks cost: measured, estimated, or as given."""
    if isinstance(planning.costs, ModelCosts):
        given = len(planning.costs.blocks)
        if given != len(whole.blocks):
            raise PlanError(
                f"costs of {given} blocks were given, and the model has {len(whole.blocks)}: give "
                "those of this model, or leave costs out"
            )
        return planning.costs
    with working(f"measuring {len(whole.blocks)} blocks"):
        if planning.costs == "profile":
            return profile(whole, options, seconds=planning.seconds)
        return estimate(whole, options)


def on_all_ranks(
    measure: Callable[[], ModelCosts], find: Callable[[ModelCosts], T], *, alone: bool = False
) -> T:
    """What rank 0 of the default process group finds for its costs, on all ranks: each might find
    something else, and cut elsewhere. All measure at once, for in a step they share memory and
    caches too. An error on one is an error on all.

    Args:
        measure: gives costs.
        find: what is wanted of them.
        alone: whether this process works for itself, whatever group it is in.
    """
    if alone or not grouped():
        return find(measure())

    def outcome() -> T | AutosplitError | None:
        try:
            costs = measure()
            return find(costs) if dist.get_rank() == 0 else None
        except AutosplitError as error:
            return error

    found = gather(outcome())
    for each in found:
        if isinstance(each, AutosplitError):
            raise each
    first: T = found[0]
    return first


def grouped() -> bool:
    """Whether there are other ranks, in the default process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def device_of_trainer(*, alone: bool = False) -> torch.device | None:
    """Where a trainer puts its stages, if that is not where the model is.

    Args:
        alone: whether it has one process, whatever group that is in.
    """
    device = None if alone or not grouped() else device_of_group()
    return None if device is None or device.type == "cpu" else device
