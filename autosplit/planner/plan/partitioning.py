"""``partition``: a whole model in, stages and what they will take out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.errors import PlanError
from autosplit.pipeline.builders.schedule_request import AUTO, ScheduleRequest
from autosplit.pipeline.engine.shapes import Part
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.training.stage_modules import LossFunction
from autosplit.planner.costs.block_costs import ModelCosts
from autosplit.planner.costs.limits import Limits
from autosplit.planner.cuts.cut_model import CutModel, Planning, cut_model, stage_count
from autosplit.planner.cuts.rank_measurement import with_host
from autosplit.planner.model.captured_model import WholeModel
from autosplit.runtime.split_options import SplitOptions
from autosplit.text.figures import parse_size
from autosplit.torch_internals.pytree import tree_flatten

from .alternatives import Configuration
from .from_solution import make_plan
from .plan import Plan, made_for


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
    loss_fn: LossFunction | None = None,
    targets: Part | None = None,
    costs: str | ModelCosts = "profile",
    seconds: float = 10.0,
    rehearse: bool | None = None,
    limits: Limits | None = None,
    memory_limit: int | str | None = None,
) -> Plan:
    """Cut a model into stages, so that a step of a schedule is short.

    Where a process group is up, all ranks must call it, but for ``ranks=1``: they measure at the
    same time, as they will run, and all cut alike. If the group is of the plan's ranks, they also
    make trial runs: they run a few steps of the stages that the measured blocks lead to, correct
    the blocks' costs by what these took, cut again, and keep the fastest. ``predicted_step`` and
    ``stage_times`` are then those of the trial runs. The model stays as it is.

    Training and evaluation are captured each. What the forward reads besides, such as an attribute
    or the rate of a dropout, stays in the stages as it was: cut the model again after changing it.

    Args:
        model: what to cut; its parameters may be on the meta device.
        args: example positional inputs of one microbatch, a tuple or one tensor; a dictionary is
            keyword inputs.
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
        loss_fn: as for the trainer; it counts in the last stage where there are ``targets``.
        targets: example targets of one microbatch; ``()`` for a loss that takes none. None: what
            the model puts out stands in for the loss.
        costs: ``"profile"`` measures blocks, ``"estimate"`` goes by their FLOPs and bytes; or the
            costs themselves, if they are known.
        seconds: how long to measure blocks; each trial run, of five at the most, takes a third.
        rehearse: False plans from costs alone; True insists, also for costs that are not measured
            here. None: with ``"profile"``, where it can be done.
        limits: memory of a rank and links; None: any, and none that takes time.
        memory_limit: bytes, or text such as ``"12GiB"``, that no rank may hold more than. Where the
            schedule alone does, another is searched, in which microbatches' state is kept in the
            host's store or made again; the plan's ``measures`` say what that costs and saves. Its
            ``trainer`` is given the limit. Where the process group is of the plan's ranks, such a
            trainer is tried, with ``loss_fn`` and ``targets`` if they are given: the plan has what
            its ranks will hold, or a limit that they cannot keep is refused. Elsewhere what
            operators take for themselves, messages and the batch are not in it, and a trainer may
            refuse a limit that the plan kept.

    Returns:
        The plan, bound to the model: a trainer takes it in place of stages.

    Raises:
        CaptureError: the model cannot be captured in one graph; names the user's line.
        PlanError: more stages than blocks, a name in ``cut_at`` that cannot be cut at, an
            unknown option, or a trial run insisted on that cannot be run.
        CapError: nothing fits; says the least cap that would do.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    count = stage_count(stages, cut_at)
    if memory_limit is not None:
        limits = _limited(
            limits or Limits(), memory_limit, split_backward=split_backward, alone=ranks == 1
        )
    planning = Planning(costs, seconds, rehearse, targets, limits, cut_at)
    found = cut_model(
        model,
        args,
        kwargs,
        count,
        ScheduleRequest(
            schedule,
            2 * count if microbatches is None else microbatches,
            ranks,
            split_backward,
            weights,
        ),
        planning,
        split=SplitOptions(backend, memory),
        autocast=autocast,
        loss_fn=loss_fn,
    )
    return _plan(found)


def _limited(
    limits: Limits, memory_limit: int | str, *, split_backward: bool, alone: bool
) -> Limits:
    """The limits with a cap for which measures are taken, and the link to the host's store."""
    if math.isfinite(limits.cap):
        raise PlanError(
            f"memory_limit={memory_limit!r} and limits with cap={limits.cap:,.0f} both say what a "
            "rank may hold: leave one of the two out"
        )
    if not split_backward:
        raise PlanError(
            "memory_limit searches a schedule of I and W: leave split_backward=False out"
        )
    links = with_host(limits.links, alone=alone)
    cap = float(parse_size(memory_limit, "memory_limit", PlanError))
    return replace(limits, cap=cap, links=links, measures=True)


def _plan(found: CutModel) -> Plan:
    """What was found, as a plan bound to the model."""
    request, solution = found.request, found.solution
    one = Configuration(
        request.stages,
        len(solution.schedule.ranks),
        request.schedule.microbatches,
        _samples(found.whole),
        AUTO if solution.schedule.name == AUTO else request.schedule.name,
        not solution.schedule.split_backward,
        found.split.memory,
        solution,
    )
    plan = make_plan(one, made_for(found.whole), request.limits, backend=found.split.backend)
    return plan.bound_to(found.whole)


def _samples(whole: WholeModel) -> int:
    """Of the first tensor among the inputs, along dimension 0."""
    leaves = tree_flatten((whole.args, whole.kwargs))[0]
    counts = [len(each) for each in leaves if isinstance(each, Tensor) and each.dim()]
    return counts[0] if counts else 1
