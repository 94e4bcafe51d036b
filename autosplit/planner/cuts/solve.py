"""Where to cut a model into stages, so that a step of a given schedule is short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from autosplit.errors import PlanError
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.search.limit_findings import MeasureEffect
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.planner.costs.block_costs import ModelCosts
from autosplit.planner.costs.limits import Limits

from .candidate_cuts import Candidate, CutSearch, triples

_FAR = 1.25  # times a known step; no start has a faster slowest stage than the first


class CapError(PlanError):
    """Nothing fits under a cap of memory; ``least`` is the least cap for which something does."""

    # A default, because an error on its way to another process is made from its message alone.
    def __init__(self, message: str, least: float = math.nan) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class Solution:
    """Stages, and what a step of them is predicted to take.

    Attributes:
        cuts: k cuts behind block k; increasing.
        schedule: built for these stages; ranks wait for each other between steps.
        costs: of each stage: times and memory of a microbatch, and the links with the messages.
        parameters: bytes of each stage.
        step: seconds.
        bubble: idle time over total time of all ranks.
        peaks: per rank, the most bytes it holds: parameters, gradients, optimizer state, and what
            is kept of the microbatches.
        effects: what each measure of memory that was taken costs and saves.
    """

    cuts: tuple[int, ...]
    schedule: Schedule
    costs: Costs
    parameters: tuple[float, ...]
    step: float
    bubble: float
    peaks: tuple[float, ...]
    effects: tuple[MeasureEffect, ...] = ()

    @property
    def uneven(self) -> float:
        """Seconds of the slowest stage over those of the mean stage."""
        seconds = list(map(sum, self.costs.times))
        return max(seconds) * len(seconds) / math.fsum(seconds) if any(seconds) else 1.0


def solve(
    costs: ModelCosts,
    stages: int,
    request: ScheduleRequest,
    *,
    limits: Limits | None = None,
    refine: bool = True,
    rival: float = math.inf,
) -> Solution:
    """The cuts with the shortest simulated step that were found, or the most even of those whose
    steps differ from it by less than the noise of the costs; deterministic.

    Dynamic programming gives cuts whose slowest stage is as fast as can be (under the cap, where
    each rank holds one stage). From there, cuts are shifted while that makes the simulated step
    shorter; where there are few ways to cut, all are tried. A schedule that is built for the times
    of its stages is built again for each result, and the search goes on from there.

    Args:
        costs: of the model's blocks, for one microbatch.
        stages: N.
        request: the schedule.
        limits: memory of a rank and links; None: as much as is needed, and transfers take no time.
        refine: False stops after the dynamic programming.
        rival: seconds of a step that is known. Where the first cuts, whose slowest stage is as
            fast as can be, are far longer, no others are looked for, if they fit under the cap.

    Raises:
        PlanError: more stages than blocks.
        CapError: no cuts were found that fit under the cap; says the least cap that would do.
        ScheduleError: an unknown schedule, one that refuses the counts, or one that runs two
            copies of the stages.
    """
    limits = limits or Limits()
    search = CutSearch(costs, stages, request, limits)
    starts = search.starts()
    first = next(starts)
    best = search.evaluate(first)
    hopeless = best.overflow > 0.0 and search.is_hopeless(best)
    if not hopeless and (best.overflow > 0.0 or best.step <= _FAR * rival):
        best = search.best([first, *starts], refine=refine)
    if best.overflow > 0.0 and not hopeless:
        frugal = search.frugal(best)
        best = search.best([frugal.cuts], refine=refine) if frugal.overflow == 0.0 else frugal
    if best.overflow > 0.0:
        least = float(best.peaks.max())
        raise CapError(
            f"no cuts into {stages} stages for {request.name!r} with "
            f"{request.microbatches} microbatches fit under a cap of {limits.cap:,.0f} bytes a "
            f"rank; the least cap that does is {least:,.0f}: raise the cap, or use more ranks, "
            "smaller microbatches, another memory setting, or a schedule that keeps fewer "
            "microbatches",
            least,
        )
    return _solution(search, best, limits.links)


def bound(costs: ModelCosts, stages: int, request: ScheduleRequest) -> float:
    """Seconds of a step below which ``solve`` finds none, known without building a schedule.

    Args:
        costs: of the model's blocks.
        stages: N.
        request: the schedule.

    Raises:
        PlanError: more stages than blocks.
    """
    return CutSearch(costs, stages, request, Limits()).bound()


def weigh(
    costs: ModelCosts,
    cuts: Sequence[int],
    request: ScheduleRequest,
    limits: Limits,
) -> Solution:
    """What a step of given cuts is predicted to take, whether they fit under the cap or not.

    Args:
        costs: of the model's blocks.
        cuts: k cuts behind block k; increasing.
        request: the schedule.
        limits: memory and links.

    Raises:
        PlanError: more stages than blocks.
        ScheduleError: see ``solve``.
    """
    search = CutSearch(costs, len(cuts) + 1, request, limits)
    return _solution(search, search.evaluate(torch.tensor(cuts, dtype=torch.int64)), limits.links)


def _solution(search: CutSearch, candidate: Candidate, links: Transfer) -> Solution:
    """The result in plain numbers."""
    stages = search.costs.stages(candidate.cuts[None])
    times = triples(stages.times[:, :, 0])
    kept = stages.kept[:, :, 0].T.tolist()
    crossing, returning = (
        dict(enumerate(sizes[:, 0].tolist())) for sizes in (stages.crossing, stages.returning)
    )
    busy = candidate.order.schedule.microbatches * sum(map(sum, times))
    return Solution(
        cuts=tuple(candidate.cuts.tolist()),
        schedule=candidate.order.schedule,
        costs=Costs(
            times,
            [StageMemory(*each) for each in kept],
            replace(links, message_bytes=crossing, gradient_bytes=returning),
        ),
        parameters=tuple(stages.parameters[:, 0].tolist()),
        step=candidate.step,
        bubble=max(0.0, 1.0 - busy / (candidate.step * candidate.order.ranks))
        if candidate.step
        else 0.0,
        peaks=tuple(candidate.peaks.tolist()),
    )
