"""A whole model captured, measured and cut for a schedule. All ranks measure at once, and cut
alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autosplit.errors import AutosplitError, PlanError
from autosplit.mesh.costs import device_of_group
from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.pipeline.engine.default_group import gather
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, ModelCosts, estimate, profile
from autosplit.planner.cuts import CapError, Solution, solve
from autosplit.planner.stages import cut
from autosplit.text.progress import working

COSTS = ("profile", "estimate")
PLANNING = ("costs", "seconds", "cut_at")
"""What a trainer's user may say of how its model is cut."""

T = TypeVar("T")


def cut_model(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    stages: int,
    request: ScheduleRequest,
    options: BlockOptions,
    *,
    costs: str | ModelCosts = "profile",
    seconds: float = 10.0,
    cut_at: Sequence[str] | None = None,
    cap: float = math.inf,
) -> tuple[WholeModel, Solution]:
    """Cut a model into stages, so that a step of a schedule is short; see ``partition``.

    Args:
        model: what to cut.
        args: example positional inputs of one microbatch.
        kwargs: example keyword inputs.
        stages: how many stages.
        request: the schedule that they are to run.
        options: how stages are made.
        costs: see ``partition``.
        seconds: likewise.
        cut_at: likewise.
        cap: bytes that no rank shall hold more than, if there are such cuts.

    Returns:
        the model, and the best cuts of it that were found with the schedule that they are for.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: it cannot be cut so; says why.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    if not isinstance(costs, ModelCosts) and costs not in COSTS:
        raise PlanError(f"unknown costs {costs!r}; known: {', '.join(COSTS)}, or a ModelCosts")
    if cut_at is not None and stages != len(cut_at) + 1:
        raise PlanError(
            f"cut_at has {len(cut_at)} names, which gives {len(cut_at) + 1} stages, but "
            f"stages={stages}"
        )
    whole = WholeModel.capture(model, args, kwargs)
    firsts: list[int] | None = None
    if cut_at is not None:
        whole, firsts = whole.divided(cut_at)
        cut(whole, firsts)  # refuses what is no cut, before anything is measured
    if not 1 <= stages <= len(whole.blocks):
        raise PlanError(
            f"{type(model).__name__} has blocks for 1 to {len(whole.blocks)} stages, got "
            f"stages={stages}"
        )
    alone = request.ranks == 1  # this process plans for itself, whatever group it is in
    options = replace(options, device=device_of_trainer(alone=alone))

    def find() -> Solution:
        known = _costs(costs, seconds, whole, options)
        with working(f"searching where to cut into {stages} stages"):
            try:
                return solve(known, stages, request, cap=cap, firsts=firsts)
            except CapError:  # a trainer moves or makes again what is too much
                return solve(known, stages, request, firsts=firsts)

    return whole, on_all_ranks(find, alone=alone)


def _costs(
    costs: str | ModelCosts, seconds: float, whole: WholeModel, options: BlockOptions
) -> ModelCosts:
    """What the blocks cost: measured, estimated, or as given."""
    if isinstance(costs, ModelCosts):
        if len(costs.blocks) != len(whole.blocks):
            raise PlanError(
                f"costs of {len(costs.blocks)} blocks were given, and the model has "
                f"{len(whole.blocks)}: give those of this model, or leave costs out"
            )
        return costs
    with working(f"measuring {len(whole.blocks)} blocks"):
        if costs == "profile":
            return profile(whole, options, seconds=seconds)
        return estimate(whole, options)


def on_all_ranks(work: Callable[[], T], *, alone: bool = False) -> T:
    """What rank 0 of the default process group finds, on all ranks: each might find something
    else, and cut elsewhere. All do the work at once, for in a step they share memory and caches
    too. An error on one is an error on all.

    Args:
        work: measures costs, and what is wanted of them.
        alone: whether this process works for itself, whatever group it is in.
    """
    if alone or not grouped():
        return work()

    def outcome() -> T | AutosplitError:
        try:
            return work()
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
