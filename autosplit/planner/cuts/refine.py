"""Refines cuts by trial runs: plan, run, correct the costs, plan again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autosplit.errors import PlanError
from autosplit.planner.costs.block_costs import BlockCost, ModelCosts
from autosplit.planner.costs.trial_run import Times, TrialRun

from .solve import Solution

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
