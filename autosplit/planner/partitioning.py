"""``partition``: a whole model in, stages and what they will take out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.compat import tree_flatten
from autosplit.errors import AutosplitError, PlanError
from autosplit.pipeline.schedule import Schedule
from autosplit.planner.configuration import Configuration
from autosplit.planner.costs import ModelCosts
from autosplit.planner.estimate import estimate
from autosplit.planner.form import form_of
from autosplit.planner.limits import Limits
from autosplit.planner.making import make_plan
from autosplit.planner.plan import Plan, made_for
from autosplit.planner.profile import profile
from autosplit.planner.solve import CapError, Solution, solve, weigh
from autosplit.planner.specimen import Conditions
from autosplit.planner.stages import cut
from autosplit.planner.whole import WholeModel

T = TypeVar("T")

COSTS = ("profile", "estimate")


def partition(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int | None = None,
    cut_at: Sequence[str] | None = None,
    microbatches: int | None = None,
    schedule: str | Schedule = "1f1b",
    ranks: int | None = None,
    split_backward: bool = True,
    weights: str | None = None,
    memory: str | int = "balanced",
    backend: str = "eager",
    autocast: torch.dtype | None = None,
    costs: str | ModelCosts = "profile",
    seconds: float = 10.0,
    limits: Limits | None = None,
) -> Plan:
    """Cut a model into stages, so that a step of a schedule is short.

    Where a process group is up, all ranks must call it, but for ``ranks=1``: rank 0 measures, and
    all cut alike.

    Args:
        model: what to cut; its parameters may be on the meta device.
        args: example positional inputs of one microbatch, a tuple or one tensor.
        kwargs: example keyword inputs.
        stages: how many stages.
        cut_at: the modules with which the stages after the first begin, as ``model.layers.8``.
            None: where it makes the step shortest.
        microbatches: M; None: two for each stage.
        schedule: a key of ``pipeline.SCHEDULES``, or a schedule that is to be run as it is.
        ranks: processes, see ``pipeline.build``.
        split_backward: False for full backwards.
        weights: where the weight gradients go, see ``pipeline.build``.
        memory: see ``autosplit.split``.
        backend: see ``autosplit.split``.
        autocast: the dtype of autocast under which the stages are to run, or None.
        costs: ``"profile"`` measures blocks, ``"estimate"`` goes by their FLOPs and bytes; or the
            costs themselves, if they are known.
        seconds: how long to measure.
        limits: memory of a rank and links; None: any, and none that takes time.

    Returns:
        The plan, bound to the model: a trainer takes it in place of stages.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: more stages than blocks, a name in ``cut_at`` that cannot be cut at, or an
            unknown option.
        CapError: nothing fits; says the least cap that would do.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    count = _count(stages, cut_at)
    if not isinstance(costs, ModelCosts) and costs not in COSTS:
        raise PlanError(f"unknown costs {costs!r}; known: {', '.join(COSTS)}, or a ModelCosts")
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
    total = microbatches or 2 * count
    limits = limits or Limits()
    form = form_of(schedule, ranks, split_backward=split_backward, weights=weights)
    conditions = Conditions(backend=backend, memory=memory, autocast=autocast)

    def find() -> Solution:
        known = _costs(whole, costs, conditions, seconds)
        if firsts is not None:
            found = weigh(known, [first - 1 for first in firsts], total, form, limits)
            return _fitting(found, limits)
        return solve(
            known,
            count,
            total,
            schedule,
            ranks=ranks,
            split_backward=split_backward,
            weights=weights,
            cap=limits.cap,
            links=limits.links,
            optimizer_state=limits.optimizer_state,
        )

    found = find() if ranks == 1 else _agreed(find)
    one = Configuration(
        count,
        len(found.schedule.ranks),
        total,
        _samples(whole),
        form.name,
        not found.schedule.split_backward,
        memory,
        found,
    )
    return make_plan(one, made_for(whole), limits, backend=backend).bound_to(whole)


def _fitting(found: Solution, limits: Limits) -> Solution:
    least = max(found.peaks)
    if least > limits.cap:
        raise CapError(
            f"the stages that cut_at gives do not fit under a cap of {limits.cap:,.0f} bytes a "
            f"rank; the least cap for them is {least:,.0f}: raise the cap, cut elsewhere, or leave "
            "cut_at out",
            least,
        )
    return found


def _count(stages: int | None, cut_at: Sequence[str] | None) -> int:
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
    whole: WholeModel, costs: str | ModelCosts, conditions: Conditions, seconds: float
) -> ModelCosts:
    if isinstance(costs, ModelCosts):
        return costs
    if costs == "estimate":
        return estimate(whole, conditions)
    return profile(whole, conditions, seconds=seconds)


def _samples(whole: WholeModel) -> int:
    """Of the first tensor among the inputs, along dimension 0."""
    leaves = tree_flatten((whole.args, whole.kwargs))[0]
    counts = [len(each) for each in leaves if isinstance(each, Tensor) and each.dim()]
    return counts[0] if counts else 1


def _agreed(find: Callable[[], T]) -> T:
    """What rank 0 of the default process group finds, on all of them.

    Each would measure something else, and cut elsewhere.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return find()
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = find()
        except AutosplitError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], AutosplitError):
        raise box[0]
    found: T = box[0]
    return found
