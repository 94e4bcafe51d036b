"""Measurements that all ranks make at once, with the same result on each.

Refines cuts by trial runs: plan, run, correct the costs, plan again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autosplit.errors import AutosplitError, PlanError
from autosplit.mesh.costs import Link, device_of_group
from autosplit.pipeline.engine.default_group import gather, tell
from autosplit.pipeline.engine.host_store import open_store
from autosplit.pipeline.engine.timing import measure_store
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.pipeline.training.memory.limited_schedule import MemoryLimitError
from autosplit.planner.costs.block_costs import BlockCost, ModelCosts, average
from autosplit.planner.costs.limits import Limits
from autosplit.planner.costs.profile import profile
from autosplit.planner.costs.trial_limit import try_limit
from autosplit.planner.costs.trial_run import Times, TrialRun, can_run_trial, run_trial
from autosplit.planner.model.block_instance import StageOptions
from autosplit.planner.model.captured_model import WholeModel

from .solve import CapError, Solution

_ROUNDS = 4


@dataclass(frozen=True)
class Refinement:
    """Cuts and costs of blocks after trial runs.

    Attributes:
        solution: the stages with the shortest step that was tried, or more even ones whose
            step is as short but for noise; their times and the step are those of the trial run.
        costs: of the blocks, as corrected by all trial runs.
    """

    solution: Solution
    costs: ModelCosts


def refine_by_trial_runs(
    costs: ModelCosts,
    find: Callable[[ModelCosts], Solution],
    run_trial: Callable[[Solution], TrialRun],
    *,
    rounds: int = _ROUNDS,
) -> Refinement:
    """Rehearse what costs lead to, correct them by what it took, and see where they lead then.

    Blocks that are timed one by one do not add up to a stage: a block alone finds its tensors in
    the cache, and the machine for itself. Their ratios show where to cut, and a trial run what that
    takes. This ends when the costs lead to what was tried already. The best of several is
    tried once more at the end, for the luckiest looks better than it is.

    Args:
        costs: of the model's blocks.
        find: the best stages for some costs.
        run_trial: runs them.
        rounds: how many different cuts to try at the most.

    Raises:
        PlanError: no rounds.
    """
    if rounds < 1:
        raise PlanError(f"rounds must be at least 1, got {rounds}")
    tried: list[object] = []
    known: list[tuple[Solution, float]] = []
    while len(tried) < rounds:
        found = find(costs)
        key = found.cuts, found.schedule.ranks
        if key in tried:
            break
        tried.append(key)
        seen = run_trial(found)
        costs = corrected(costs, [cut + 1 for cut in found.cuts], seen.times)
        known.append((_as_seen(found, seen), seen.noise))
    best = _best(known)
    if len(tried) > 1:
        best = _as_seen(best, run_trial(best))
    return Refinement(best, costs)


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


def _best(known: Sequence[tuple[Solution, float]]) -> Solution:
    """The most even of those that are no slower than the fastest, as far as that can be told."""
    fastest, noise = min(known, key=lambda each: each[0].step)
    near = [one for one, own in known if one.step <= fastest.step * (1.0 + max(own, noise))]
    return min(near, key=lambda one: (one.uneven, one.step)) if len(near) > 1 else fastest


def _factor(seen: float, planned: float) -> float:
    """1 where nothing was planned, so that nothing can be scaled."""
    return max(seen, 0.0) / planned if planned > 0.0 else 1.0


def _as_seen(found: Solution, seen: TrialRun) -> Solution:
    busy = found.schedule.microbatches * sum(map(sum, seen.times))
    return replace(
        found,
        costs=replace(found.costs, times=seen.times),
        step=seen.step,
        bubble=max(0.0, 1.0 - busy / (seen.step * len(found.schedule.ranks))),
    )


T = TypeVar("T")

Find = Callable[[ModelCosts], Solution]

# For the timed steps of each trial run: of the seconds of profiling, and at the most.
_SHARE, _MOST = 0.3, 5.0
_DAY = 86_400


def check_seconds(seconds: float) -> None:
    """Refuse what is no time to measure for.

    Raises:
        PlanError: negative, not finite, or more than a day.
    """
    if not 0.0 <= seconds <= _DAY:
        raise PlanError(
            f"seconds to measure for must be from 0 to {_DAY:,} (a day), got {seconds!r}"
        )


def profile_together(
    whole: WholeModel, options: StageOptions, seconds: float, *, alone: bool
) -> ModelCosts:
    """Profile on all ranks at once, for in a step they share memory and caches too; the mean.

    Args:
        whole: the model.
        options: how stages are made.
        seconds: how long to measure.
        alone: whether this process measures for itself, whatever group it is in.
    """
    if alone or not grouped():
        return profile(whole, options, seconds=seconds)
    return average(_everywhere(lambda: profile(whole, options, seconds=seconds)))


def refined_by_trial_runs(
    whole: WholeModel,
    costs: ModelCosts,
    find: Find,
    options: StageOptions,
    seconds: float,
    *,
    insist: bool = False,
) -> Solution:
    """The stages that costs lead to, after trial runs; those of the costs where none can be run.

    Args:
        whole: the model.
        costs: of its blocks.
        find: the best stages for some costs, for the number of ranks that a trial run has.
        options: how stages are made.
        seconds: how long blocks were measured; a trial run takes less.
        insist: refuse rather than leave the trial run out.

    Raises:
        PlanError: insisted on what cannot be run.
    """
    first = find(costs)
    if not can_run_trial(whole, first.schedule):
        if insist:
            raise _cannot(first.schedule)
        return first

    def run(found: Solution) -> TrialRun:
        return run_trial(
            whole,
            [cut + 1 for cut in found.cuts],
            found.schedule,
            options,
            planned=found.costs.times,
            seconds=min(seconds * _SHARE, _MOST),
        )

    return refine_by_trial_runs(costs, find, run).solution


def kept_as_tried(
    whole: WholeModel, found: Solution, options: StageOptions, limits: Limits, *, run: bool
) -> Solution | None:
    """A solution with what its ranks hold as a trainer has it; None where its ranks are not here.

    Args:
        whole: the model.
        found: its stages.
        options: how stages are made.
        limits: the limit.
        run: whether to run steps, too.

    Raises:
        CapError: a trainer finds nothing that keeps the limit; says for which one it does.
    """
    if not can_run_trial(whole, found.schedule):
        return None
    firsts = [cut + 1 for cut in found.cuts]
    try:
        peaks = try_limit(
            whole,
            firsts,
            found.schedule,
            options,
            int(limits.cap),
            optimizer_state=limits.optimizer_state,
            run=run,
        )
    except MemoryLimitError as error:
        raise CapError(str(error), error.least) from error
    return replace(found, peaks=peaks)


def agreed(find: Callable[[], T]) -> T:
    """What rank 0 of the default process group finds, on all of them.

    Each might find something else, and cut elsewhere.
    """
    if not grouped():
        return find()
    found: T = _value(tell(_outcome(find) if dist.get_rank() == 0 else None, 0))
    return found


def _everywhere(find: Callable[[], T]) -> list[T]:
    """What each rank finds, on all of them; an error on one is an error on all."""
    return list(map(_value, gather(_outcome(find))))


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


def with_host(links: Transfer, *, alone: bool) -> Transfer:
    """The links, that of each rank to its host's store measured where it is not known; collective
    over the default process group, but for what is ``alone``.
    """
    if links.host is not None:
        return links
    device = device_of_trainer(alone=alone) or torch.device("cpu")

    def measured() -> Link:
        return measure_store(open_store(device, None))

    return replace(links, host=measured() if alone else agreed(measured))


def _cannot(schedule: Schedule) -> PlanError:
    return PlanError(
        f"a rehearsal of {schedule.name!r} needs its {len(schedule.ranks)} ranks in the default "
        "process group, and inputs with samples along dimension 0 only: start the processes first, "
        "see autosplit.pipeline.launch, or leave rehearse out"
    )
