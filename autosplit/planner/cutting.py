"""A whole model captured, measured, cut for a schedule, and refined by trial runs: plan, run,
correct the costs, plan again. All ranks measure at once, with the same result on each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autosplit.errors import AutosplitError, PipelineError, PlanError
from autosplit.mesh.costs import device_of_group
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.engine.default_group import gather
from autosplit.pipeline.training.batches import Part
from autosplit.pipeline.training.stage_modules import LossFunction
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockCost, Limits, ModelCosts, average
from autosplit.planner.cuts import CapError, Solution, solve, weigh
from autosplit.planner.estimate import estimate
from autosplit.planner.profile import BlockOptions, profile
from autosplit.planner.stages import cut
from autosplit.planner.trial import Times, TrialRun, can_run_trial, run_trial
from autosplit.runtime.split_options import SplitOptions
from autosplit.text.progress import working

COSTS = ("profile", "estimate")
_TRIALS = 4  # different cuts that are tried at the most
# For the timed steps of each trial run: of the seconds of profiling, and at the most.
_SHARE, _MOST = 0.3, 5.0
_DAY = 86_400

T = TypeVar("T")
Find = Callable[[ModelCosts], Solution]


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
    rehearse: bool = True
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


def finder(
    stages: int, firsts: Sequence[int] | None, schedule: ScheduleRequest, limits: Limits
) -> Find:
    """What finds the best stages for some costs, the same on all ranks.

    Args:
        stages: how many.
        firsts: the first blocks of all stages but the first; None: where the step is shortest.
        schedule: what they are to run.
        limits: memory of a rank and links.

    Returns:
        raises CapError where nothing fits, which says the least cap that would do (but not where
        a trainer is to take measures: then the shortest step is found), and
        ScheduleError for an unknown schedule, or one that refuses the counts.
    """

    def within(costs: ModelCosts, cap: float) -> Solution:
        capped = replace(limits, cap=cap)
        if firsts is None:
            with working(f"searching where to cut into {stages} stages"):
                return solve(costs, stages, schedule, limits=capped)
        return _fitting(weigh(costs, firsts, schedule, capped), capped)

    def find(costs: ModelCosts) -> Solution:
        try:
            return within(costs, limits.cap)
        except CapError:
            if not limits.measures:
                raise
            return within(costs, math.inf)

    if schedule.ranks == 1:  # this process plans for itself, whatever group it is in
        return find
    return lambda costs: agreed(lambda: find(costs))


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
    find = finder(stages, firsts, schedule, planning.limits)
    alone = schedule.ranks == 1
    options = BlockOptions(
        split,
        autocast=autocast,
        loss_fn=None if planning.targets is None else loss_fn,
        targets=planning.targets,
        device=device_of_trainer(alone=alone),
    )
    costs = _costs(planning, whole, options, alone=alone)
    if planning.costs != "profile" or not planning.rehearse:
        return whole, find(costs)
    found, _ = refine_by_trial_runs(costs, find, trial_of(whole, options, planning.seconds))
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


def refine_by_trial_runs(
    costs: ModelCosts, find: Find, run: Callable[[Solution], TrialRun | None]
) -> tuple[Solution, ModelCosts]:
    """Rehearse what costs lead to, correct them by what it took, and see where they lead then.

    Blocks that are timed one by one do not add up to a stage: a block alone finds its tensors in
    the cache, and the machine for itself. Their ratios show where to cut, and a trial run what that
    takes. This ends when the costs lead to what was tried already. The best of several is
    tried once more at the end, for the luckiest looks better than it is.

    Args:
        costs: of the model's blocks.
        find: the best stages for some costs.
        run: tries them; None where that cannot be done here.

    Returns:
        the stages with the shortest step that was tried (of the costs, where none was), or more
        even ones whose step is as short but for noise, with times and step of the trial run; and
        the costs of the blocks, as
        corrected by all trial runs.
    """
    tried: list[object] = []
    known: list[tuple[Solution, float]] = []
    while len(tried) < _TRIALS:
        found = find(costs)
        key = found.firsts, found.schedule.ranks
        if key in tried:
            break
        tried.append(key)
        seen = run(found)
        if seen is None:
            return found, costs
        costs = corrected(costs, found.firsts, seen.times)
        known.append((_as_seen(found, seen), seen.noise))
    best = _best(known)
    again = run(best) if len(tried) > 1 else None
    return best if again is None else _as_seen(best, again), costs


def corrected(costs: ModelCosts, firsts: Sequence[int], times: Sequence[Times]) -> ModelCosts:
    """The costs with blocks scaled so that each of these stages takes the times given.

    Args:
        costs: of the model's blocks.
        firsts: the first block of every stage but the first.
        times: per stage, seconds of F, I and W; I and W of the first are one backward.
    """
    blocks: list[BlockCost] = []
    for (first, last), seen in zip(pairwise([0, *firsts, len(costs.blocks)]), times, strict=True):
        planned = costs.stage(first, last).times
        if first == 0:
            seen = (seen[0], 0.0, seen[1] + seen[2])
        forward, inputs, weights = (
            _factor(a - costs.call, b - costs.call) for a, b in zip(seen, planned, strict=True)
        )
        if first == 0:
            inputs = weights
        blocks += [_scaled(block, forward, inputs, weights) for block in costs.blocks[first:last]]
    return replace(costs, blocks=tuple(blocks))


def _scaled(block: BlockCost, forward: float, inputs: float, weights: float) -> BlockCost:
    scaled = replace(
        block,
        forward=block.forward * forward,
        backward_input=block.backward_input * inputs,
        backward_weight=block.backward_weight * weights,
    )
    before = block.backward_input + block.backward_weight
    after = scaled.backward_input + scaled.backward_weight
    return replace(scaled, backward_alone=block.backward_alone * _factor(after, before))


def _factor(seen: float, planned: float) -> float:
    """1 where nothing was planned, so that nothing can be scaled."""
    return max(seen, 0.0) / planned if planned > 0.0 else 1.0


def _best(known: Sequence[tuple[Solution, float]]) -> Solution:
    """The most even of those that are no slower than the fastest, as far as that can be told."""
    fastest, noise = min(known, key=lambda each: each[0].step)
    near = [one for one, own in known if one.step <= fastest.step * (1.0 + max(own, noise))]
    return min(near, key=lambda one: (one.uneven, one.step))


def _as_seen(found: Solution, seen: TrialRun) -> Solution:
    busy = found.schedule.microbatches * sum(map(sum, seen.times))
    return replace(
        found,
        costs=replace(found.costs, times=seen.times),
        step=seen.step,
        bubble=max(0.0, 1.0 - busy / (seen.step * len(found.schedule.ranks))),
    )


def trial_of(
    whole: WholeModel, options: BlockOptions, seconds: float
) -> Callable[[Solution], TrialRun | None]:
    """What tries stages of a model, where this process, with those of its group, can run them.

    Args:
        whole: the model.
        options: how stages are made.
        seconds: how long blocks were measured; a trial run takes less.
    """

    def run(found: Solution) -> TrialRun | None:
        if not can_run_trial(whole, found.schedule):
            return None
        times, most = found.costs.times, min(seconds * _SHARE, _MOST)
        with working("running a trial of the stages"):
            return run_trial(
                whole, found.firsts, found.schedule, options, planned=times, seconds=most
            )

    return run


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
