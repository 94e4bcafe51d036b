"""A whole model captured, measured, cut for a schedule, and refined by trial runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from autosplit.errors import PipelineError, PlanError
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.engine.shapes import Part
from autosplit.pipeline.training.stage_modules import LossFunction
from autosplit.planner.costs.block_costs import ModelCosts
from autosplit.planner.costs.estimate import estimate
from autosplit.planner.costs.limits import Limits
from autosplit.planner.model.block_instance import StageOptions
from autosplit.planner.model.captured_model import WholeModel
from autosplit.planner.model.stages import Partition, cut
from autosplit.runtime.split_options import SplitOptions

from .cut_request import CutRequest
from .rank_measurement import (
    check_seconds,
    device_of_trainer,
    kept_as_tried,
    profile_together,
    refined_by_trial_runs,
)
from .solve import Solution

COSTS = ("profile", "estimate")


@dataclass(frozen=True)
class Planning:
    """How a model's cuts are found; ``autosplit.partition`` says what each means.

    Raises:
        PlanError: unknown costs, or seconds that are none.
    """

    costs: str | ModelCosts = "profile"
    seconds: float = 10.0
    rehearse: bool | None = None
    targets: Part | None = None
    limits: Limits | None = None
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

    @property
    def tries(self) -> bool:
        """Whether a trainer is tried within a limit of memory, where it can be: not where costs
        are of another model or machine, as far as can be known.
        """
        return self.rehearses or isinstance(self.costs, str)

    @property
    def rehearses(self) -> bool:
        """Whether trial runs are wanted, where they can be made."""
        return self.costs == "profile" if self.rehearse is None else self.rehearse


@dataclass(frozen=True)
class CutModel:
    """A model and the best cuts of it that were found.

    Attributes:
        whole: the model.
        request: what it was to be cut into.
        solution: the cuts, with the schedule that they are for.
        split: how its stages are split.
    """

    whole: WholeModel
    request: CutRequest
    solution: Solution
    split: SplitOptions = field(default_factory=SplitOptions)

    def partition(self) -> Partition:
        """The stages, none of them built yet."""
        return cut(self.whole, [each + 1 for each in self.solution.cuts])


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
) -> CutModel:
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

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: it cannot be cut so; says why.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    whole, firsts = _captured(model, args, kwargs, stages, planning.cut_at)
    request = CutRequest(stages, firsts, schedule, planning.limits or Limits())
    options = StageOptions(
        split,
        autocast=autocast,
        loss_fn=None if planning.targets is None else loss_fn,
        targets=planning.targets,
        device=device_of_trainer(alone=request.alone),
    )
    costs = _costs(planning, whole, options, alone=request.alone)
    tries = request.limits.measures and planning.tries
    find = request.nearest if tries else request.best
    if planning.rehearses:
        insist = bool(planning.rehearse)
        found = refined_by_trial_runs(whole, costs, find, options, planning.seconds, insist=insist)
    else:
        found = find(costs)
    if tries:
        # Graphs alone tell less than a trainer knows, and of a limit too low not what would do.
        tried = kept_as_tried(whole, found, options, request.limits, run=planning.rehearses)
        found = tried or request.best(costs)
    return CutModel(whole, request, found, split)


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


def _captured(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    stages: int,
    cut_at: Sequence[str] | None,
) -> tuple[WholeModel, list[int] | None]:
    """The model in blocks, and those that ``cut_at`` names; refuses what is no cut of it."""
    count = stage_count(stages, cut_at)
    whole = WholeModel.capture(model, args, kwargs)
    firsts = None
    if cut_at is not None:
        whole = whole.divided(cut_at)
        firsts = [whole.start(name) for name in cut_at]
        cut(whole, firsts)  # refuses what is no cut, before anything is measured
    if not 1 <= count <= len(whole.blocks):
        raise PlanError(
            f"{type(model).__name__} has blocks for 1 to {len(whole.blocks)} stages, got "
            f"stages={count}"
        )
    return whole, firsts


def _costs(
    planning: Planning, whole: WholeModel, options: StageOptions, *, alone: bool
) -> ModelCosts:
    """What the blocks cost: measured, estimated, or as given."""
    if isinstance(planning.costs, ModelCosts):
        return planning.costs
    if planning.costs == "profile":
        return profile_together(whole, options, planning.seconds, alone=alone)
    return estimate(whole, options)
