"""Choose cuts of a model that make the step of a schedule short.

The search starts from cuts that divide the work evenly, and shifts them while that shortens the
simulated step.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autosplit.errors import PlanError
from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.pipeline.preparation import prepare_schedule
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.collectives import ParameterRanks
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.planner.costs import BlockCost, ModelCosts

_WORK = 60_000  # the most actions that are simulated for one schedule, in some seconds
_SHIFTS = (1, -1, 2, -2)  # blocks by which cuts are moved
_SAME = 1 + 1e-9
_MEMORY = (0.0, 0.5, 1.0)
"""Under a cap, starting cuts divide a mix of time and memory evenly; these are memory's shares."""

Firsts = tuple[int, ...]
"""A set of cuts: the first block of every stage but the first."""


class CapError(PlanError):
    """No cuts fit under a memory cap; ``least`` is the smallest cap under which some fit."""

    # With a default, because an error that is sent to another process is rebuilt from its message.
    def __init__(self, message: str, least: float = math.nan) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class Solution:
    """The cuts of a model, and the predicted step of their stages.

    Attributes:
        firsts: the first block of every stage except the first, increasing.
        schedule: the schedule that was built for these stages; ranks wait for each other between
            steps.
        costs: the costs of each stage: times and memory of a microbatch, and the links with the
            messages.
        parameters: bytes of each stage's parameters.
        step: seconds of a step.
        bubble: idle time over total time of all ranks.
        peaks: per rank, its peak bytes: parameters, gradients, optimizer state and activations.
        request: the request from which the schedule was built.
        blocks: costs of the model's blocks.
    """

    firsts: tuple[int, ...]
    schedule: Schedule
    costs: Costs
    parameters: tuple[float, ...]
    step: float
    bubble: float
    peaks: tuple[float, ...]
    request: ScheduleRequest
    blocks: ModelCosts


def solve(
    costs: ModelCosts,
    stages: int,
    request: ScheduleRequest,
    *,
    cap: float | Sequence[float] = math.inf,
    optimizer_state: float = 2.0,
    links: Transfer | None = None,
    copies: ParameterRanks | None = None,
    firsts: Sequence[int] | None = None,
    refine: bool = True,
) -> Solution:
    """Find the cuts with the shortest simulated step; deterministic.

    The search starts from cuts that divide the time evenly; under a cap, also from cuts that divide
    the memory evenly. It shifts cuts while that shortens the simulated step.

    Args:
        costs: the costs of the model's blocks, for one microbatch.
        stages: the number of stages.
        request: the requested schedule.
        cap: the most bytes of a rank: one number, or one for each rank.
        optimizer_state: bytes for each byte of parameters; 2 for Adam, 0 for plain SGD.
        links: latency and bandwidth between ranks; the bytes of messages follow from the cuts.
            None: transfers take no time.
        copies: the ranks that have copies or shards of each stage; None: no other ranks. Shards do
            not lower the predicted memory.
        firsts: the first block of every stage except the first, if the user chose the cuts; None:
            search.
        refine: False returns the best starting cuts.

    Raises:
        PlanError: more stages than blocks.
        CapError: no cuts fit under the cap; names the smallest cap under which some fit.
        ScheduleError: the schedule is unknown, or does not support these counts.
    """
    search = _Search(
        costs, stages, request, cap, 2.0 + optimizer_state, links or Transfer(), copies
    )
    settled = None if firsts is None else [tuple(firsts)]
    starts = [*map(search.evaluate, settled or search.starts())]
    best = min(starts, key=search.key)
    while refine and not settled and (better := search.better(best)) is not None:
        best = better
    # A search within any cap tries the starts.
    search.check_limit(best, min(max(solution.peaks) for solution in starts))
    return best


class _Search:
    """The search for one model's cuts under one schedule; arguments and errors as for ``solve``."""

    def __init__(
        self,
        costs: ModelCosts,
        stages: int,
        request: ScheduleRequest,
        cap: float | Sequence[float],
        factor: float,
        links: Transfer,
        copies: ParameterRanks | None,
    ) -> None:
        self._blocks = len(costs.blocks)
        if not 1 <= stages <= self._blocks:
            raise PlanError(
                f"cannot cut {self._blocks} blocks into {stages} stages: expected 1 to "
                f"{self._blocks} stages"
            )
        self._costs, self._count, self._request = costs, stages, request
        self._caps = tuple(cap) if isinstance(cap, Sequence) else (cap,) * stages
        self._links, self._copies = links, copies
        # Bytes of parameters, gradients and optimizer state over bytes of parameters.
        self._factor = factor
        self._stage = functools.cache(costs.stage)
        self._solutions: dict[Firsts, Solution] = {}
        self._simulated = 0

    def evaluate(self, firsts: Firsts) -> Solution:
        """Simulate a step with these cuts. As in a trainer, ranks wait for each other between
        steps.
        """
        if firsts in self._solutions:
            return self._solutions[firsts]
        stages = self._stages(firsts)
        seconds = [stage.times for stage in stages]
        schedule = prepare_schedule(self._request, self._count, seconds)
        schedule = replace(schedule, crosses_step=False)
        sent = {at: self._costs.crossing[k - 1] for at, k in enumerate(firsts)}
        links = replace(self._links, message_bytes=sent)
        costs = Costs(
            seconds,
            [StageMemory(stage.saved, stage.deferred) for stage in stages],
            links,
            collectives=[self._copies.of_stage(stage.parameters) for stage in stages]
            if self._copies
            else (),
        )
        timeline = costs.timeline(schedule)
        peaks = peak_memory(schedule, costs.memory)
        for cost, rank in zip(stages, schedule.placement, strict=True):
            peaks[rank] += self._factor * cost.parameters
        self._simulated += sum(map(len, schedule.ranks))
        self._solutions[firsts] = Solution(
            firsts,
            schedule,
            costs,
            tuple(stage.parameters for stage in stages),
            timeline.makespan,
            max(0.0, timeline.bubble_ratio()),
            tuple(peaks),
            self._request,
            self._costs,
        )
        return self._solutions[firsts]

    def check_limit(self, solution: Solution, least: float) -> None:
        """Refuse a solution that does not fit under the cap."""
        if self._overflow(solution) > 0.0:
            raise CapError(
                f"no cuts into {self._count} stages for {self._request.name!r} with "
                f"{self._request.microbatches} microbatches fit under a cap of "
                f"{min(self._caps):,.0f} bytes a rank; the least cap that works is {least:,.0f}: "
                "raise it, or use more ranks, smaller microbatches, or a schedule that keeps fewer "
                "of them",
                least,
            )

    def _overflow(self, solution: Solution) -> float:
        """Bytes above the cap, over all ranks."""
        pairs = zip(solution.peaks, self._caps, strict=False)  # fewer ranks than stages
        return math.fsum(peak - cap for peak, cap in pairs if peak > cap * _SAME)

    def key(self, solution: Solution) -> tuple[float, float]:
        """Sort key of a solution; the best solution has the smallest."""
        return self._overflow(solution), solution.step

    def starts(self) -> Iterator[Firsts]:
        """Yield cuts from which the search starts; they are as even as possible."""
        blocks, under_way = self._costs.blocks, min(self._request.microbatches, self._count)
        times = _shares([sum(block.times) for block in blocks])
        memory = _shares(
            [self._factor * block.parameters + under_way * block.saved for block in blocks]
        )
        for share in _MEMORY if math.isfinite(min(self._caps)) else _MEMORY[:1]:
            both = zip(times, memory, strict=True)
            sums = [*itertools.accumulate((1 - share) * t + share * h for t, h in both)]
            firsts = [0]
            for stage in range(1, self._count):
                able = range(firsts[-1] + 1, self._blocks - self._count + stage + 1)
                firsts.append(min(able, key=lambda k: abs(sums[k - 1] - stage / self._count)))
            yield tuple(firsts[1:])

    def better(self, best: Solution) -> Solution | None:
        """Return better cuts, or None. Candidates are tried by the lower bound of their step."""
        longest = best.step * _SAME if self._overflow(best) == 0.0 else math.inf
        for firsts in sorted(self._shifted(best.firsts), key=self._least_step):
            if self._least_step(firsts) > longest or self._simulated > _WORK:
                break
            if firsts not in self._solutions and self.key(self.evaluate(firsts)) < self.key(best):
                return self._solutions[firsts]
        return None

    def _shifted(self, firsts: Firsts) -> Iterator[Firsts]:
        """Yield cuts in which a run of neighbouring cuts is shifted together."""
        for low, high in itertools.combinations(range(self._count), 2):
            for shift in _SHIFTS:
                moved = (*firsts[:low], *(k + shift for k in firsts[low:high]), *firsts[high:])
                if all(a < b for a, b in itertools.pairwise((0, *moved, self._blocks))):
                    yield moved

    def _least_step(self, firsts: Firsts) -> float:
        """A lower bound of the step in seconds: a stage starts after one F of each earlier stage,
        and then runs all its actions without a pause.
        """
        begins = least = 0.0
        for stage in self._stages(firsts):
            least = max(least, begins + self._request.microbatches * sum(stage.times))
            begins += stage.forward
        return least

    def _stages(self, firsts: Firsts) -> list[BlockCost]:
        return [self._stage(*ends) for ends in itertools.pairwise((0, *firsts, self._blocks))]


def _shares(sizes: Sequence[float]) -> list[float]:
    """Each size as a fraction of their sum."""
    whole = sum(sizes) or 1.0
    return [size / whole for size in sizes]
