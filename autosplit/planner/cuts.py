"""Where to cut a model so that a step of a schedule is short.

Cuts that share out the work evenly are shifted while that makes the simulated step shorter.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autosplit.errors import PlanError
from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import Transfer

from .costs import BlockCost, ModelCosts

_WORK = 60_000  # actions that are simulated for one schedule: seconds
_SHIFTS = (1, -1, 2, -2)  # blocks by which cuts are moved
_SAME = 1 + 1e-9
_MEMORY = (0.0, 0.5, 1.0)
"""Under a cap, the shares of memory, beside that of time, in what stages of a start have alike."""

Firsts = tuple[int, ...]
"""A way to cut: the first block of every stage but the first."""


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
        firsts: the first block of every stage but the first; increasing.
        schedule: built for these stages; ranks wait for each other between steps.
        costs: of each stage: times and memory of a microbatch, and the links with the messages.
        parameters: bytes of each stage.
        step: seconds.
        bubble: idle time over total time of all ranks.
        peaks: per rank, the most bytes it holds: parameters, gradients, optimizer state, and what
            is kept of the microbatches.
    """

    firsts: tuple[int, ...]
    schedule: Schedule
    costs: Costs
    parameters: tuple[float, ...]
    step: float
    bubble: float
    peaks: tuple[float, ...]


def solve(
    costs: ModelCosts,
    stages: int,
    request: ScheduleRequest,
    *,
    cap: float = math.inf,
    optimizer_state: float = 2.0,
    links: Transfer | None = None,
    firsts: Sequence[int] | None = None,
    refine: bool = True,
) -> Solution:
    """The cuts with the shortest simulated step that were found; deterministic.

    From cuts that are even in time, or under a cap in memory as well, cuts are shifted while that
    makes the simulated step shorter.

    Args:
        costs: of the model's blocks, for one microbatch.
        stages: N.
        request: the schedule.
        cap: bytes that each rank may hold.
        optimizer_state: bytes for each byte of parameters; 2 for Adam, 0 for plain SGD.
        links: latency and bandwidth between ranks, whose message bytes are not looked at, as those
            of the cuts count; None: transfers take no time.
        firsts: the first block of every stage but the first, where that is settled.
        refine: False shifts no cuts.

    Raises:
        PlanError: more stages than blocks.
        CapError: no cuts were found that fit under the cap; says the least cap for which some were.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    search = _Search(costs, stages, request, cap, 2.0 + optimizer_state, links or Transfer())
    settled = None if firsts is None else [tuple(firsts)]
    starts = [*map(search.evaluate, settled or search.starts())]
    best = min(starts, key=search.key)
    while refine and not settled and (better := search.better(best)) is not None:
        best = better
    # A search within any cap begins with these.
    search.check(best, min(max(each.peaks) for each in starts))
    return best


class _Search:
    """The search for one model's cuts under one schedule; arguments and errors are ``solve``'s."""

    def __init__(
        self,
        costs: ModelCosts,
        stages: int,
        request: ScheduleRequest,
        cap: float,
        factor: float,
        links: Transfer,
    ) -> None:
        self._blocks = len(costs.blocks)
        if not 1 <= stages <= self._blocks:
            raise PlanError(
                f"cannot cut {self._blocks} blocks into {stages} stages: expected 1 to "
                f"{self._blocks} stages"
            )
        self._costs, self._count, self._request = costs, stages, request
        self._cap, self._links = cap, links
        # Of parameters a rank holds these, their gradients, and what the optimizer keeps.
        self._factor = factor
        self._stage = functools.cache(costs.stage)
        self._known: dict[Firsts, Solution] = {}
        self._simulated = 0

    def evaluate(self, firsts: Firsts) -> Solution:
        """One way to cut, in a step between which ranks wait for each other, as a trainer's do."""
        if firsts in self._known:
            return self._known[firsts]
        stages = self._stages(firsts)
        seconds = [each.times for each in stages]
        schedule = replace(self._request.build(self._count, seconds), crosses_step=False)
        sent = {at: self._costs.crossing[k - 1] for at, k in enumerate(firsts)}
        links = replace(self._links, message_bytes=sent)
        costs = Costs(seconds, [StageMemory(each.saved, each.deferred) for each in stages], links)
        timeline = costs.timeline(schedule)
        peaks = peak_memory(schedule, costs.memory)
        for each, rank in zip(stages, schedule.placement, strict=True):
            peaks[rank] += self._factor * each.parameters
        self._simulated += sum(map(len, schedule.ranks))
        self._known[firsts] = Solution(
            firsts,
            schedule,
            costs,
            tuple(each.parameters for each in stages),
            timeline.makespan,
            max(0.0, timeline.bubble_ratio()),
            tuple(peaks),
        )
        return self._known[firsts]

    def check(self, found: Solution, least: float) -> None:
        """Refuse what does not fit under the cap."""
        if self._overflow(found) > 0.0:
            raise CapError(
                f"no cuts into {self._count} stages for {self._request.name!r} with "
                f"{self._request.microbatches} microbatches fit under a cap of {self._cap:,.0f} "
                f"bytes a rank; a cap that does is {least:,.0f}: raise it, or use more ranks, "
                "smaller microbatches, or a schedule that keeps fewer of them",
                least,
            )

    def _overflow(self, found: Solution) -> float:
        """Bytes above the cap, over all ranks."""
        return math.fsum(peak - self._cap for peak in found.peaks if peak > self._cap * _SAME)

    def key(self, found: Solution) -> tuple[float, float]:
        """What is less is better."""
        return self._overflow(found), found.step

    def starts(self) -> Iterator[Firsts]:
        """Cuts nearest to those that give each stage as much."""
        blocks, under_way = self._costs.blocks, min(self._request.microbatches, self._count)
        times = _shares([sum(each.times) for each in blocks])
        held = _shares([self._factor * each.parameters + under_way * each.saved for each in blocks])
        for share in _MEMORY if math.isfinite(self._cap) else _MEMORY[:1]:
            both = zip(times, held, strict=True)
            sums = [*itertools.accumulate((1 - share) * t + share * h for t, h in both)]
            firsts = [0]
            for stage in range(1, self._count):
                able = range(firsts[-1] + 1, self._blocks - self._count + stage + 1)
                firsts.append(min(able, key=lambda k: abs(sums[k - 1] - stage / self._count)))
            yield tuple(firsts[1:])

    def better(self, best: Solution) -> Solution | None:
        """Another way to cut, if one is found; the first to be tried is that whose slowest stage
        may be done the earliest.
        """
        longest = best.step * _SAME if self._overflow(best) == 0.0 else math.inf
        for way in sorted(self._shifted(best.firsts), key=self._earliest):
            if self._earliest(way) > longest or self._simulated > _WORK:
                break
            if way not in self._known and self.key(self.evaluate(way)) < self.key(best):
                return self._known[way]
        return None

    def _shifted(self, firsts: Firsts) -> Iterator[Firsts]:
        """The ways to cut to which runs of neighbouring cuts are shifted together."""
        for low, high in itertools.combinations(range(self._count), 2):
            for shift in _SHIFTS:
                moved = (*firsts[:low], *(k + shift for k in firsts[low:high]), *firsts[high:])
                if all(a < b for a, b in itertools.pairwise((0, *moved, self._blocks))):
                    yield moved

    def _earliest(self, firsts: Firsts) -> float:
        """Seconds before which no step can be over: a stage begins when the Fs before it are done,
        and then has all its work to do.
        """
        begins = least = 0.0
        for stage in self._stages(firsts):
            least = max(least, begins + self._request.microbatches * sum(stage.times))
            begins += stage.forward
        return least

    def _stages(self, firsts: Firsts) -> list[BlockCost]:
        return [self._stage(*ends) for ends in itertools.pairwise((0, *firsts, self._blocks))]


def _shares(sizes: Sequence[float]) -> list[float]:
    """Of each in the sum of all."""
    whole = sum(sizes) or 1.0
    return [size / whole for size in sizes]
