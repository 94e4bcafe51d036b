"""Where to cut a model so that a step of a schedule is short.

Dynamic programming over the blocks gives cuts to start from. From the best of them, cuts are
shifted while that makes the simulated step shorter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autosplit.errors import PlanError
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs

from .costs import Limits, ModelCosts

_SLACKS = (1.0, 1.03, 1.1)  # how much longer than the least the slowest stage of a start may be
_WORK = 60_000  # actions that are simulated for one schedule: seconds
_SHIFTS = (1, -1, 2, -2)  # blocks by which cuts are moved
_SAME = 1 + 1e-9
_KEPT = {
    ActionKind.FORWARD: (1, 0),
    ActionKind.BACKWARD_INPUT: (-1, 1),
    ActionKind.BACKWARD_WEIGHT: (0, -1),
    ActionKind.BACKWARD: (-1, 0),
}
"""Saved and deferred microbatches that each adds."""

Firsts = tuple[int, ...]
"""A way to cut: the first block of every stage but the first."""
Table = Tensor
"""What a stage costs that begins before block i and ends before block j, [B + 1, B + 1]; infinite
where it may not."""


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

    def resting(self, limits: Limits) -> list[float]:
        """Bytes of each rank for parameters, gradients and optimizer state."""
        found = [0.0] * len(self.schedule.ranks)
        for stage, rank in enumerate(self.schedule.placement):
            found[rank] += limits.factor * self.parameters[stage]
        return found


def solve(
    costs: ModelCosts,
    stages: int,
    request: ScheduleRequest,
    *,
    limits: Limits | None = None,
    refine: bool = True,
) -> Solution:
    """The cuts with the shortest simulated step that were found; deterministic.

    Dynamic programming gives cuts whose slowest stage is done as early as can be (under the cap,
    where each rank holds one stage). From there, cuts are shifted while that makes the simulated
    step shorter.

    Args:
        costs: of the model's blocks, for one microbatch.
        stages: N.
        request: the schedule.
        limits: memory of a rank and links; None: as much as is needed, and transfers take no time.
        refine: False stops after the dynamic programming, at the first cuts that fit.

    Raises:
        PlanError: more stages than blocks.
        CapError: no cuts were found that fit under the cap; says the least cap that would do.
        ScheduleError: an unknown schedule, or one that refuses the counts.
    """
    limits = limits or Limits()
    search = _Search(costs, stages, request, limits)
    best = search.best(refine=refine)
    if search.overflow(best) > 0.0:
        least = search.least()
        # Where a search begins depends on its cap, so it may miss what another came upon.
        while True:
            again = _Search(costs, stages, request, replace(limits, cap=least))
            if again.overflow(again.best(refine=refine)) == 0.0:
                break
            least = again.least()
        raise CapError(
            f"no cuts into {stages} stages for {request.name!r} with "
            f"{request.microbatches} microbatches fit under a cap of {limits.cap:,.0f} bytes a "
            f"rank; the least cap that does is {least:,.0f}: raise the cap, or use more ranks, "
            "smaller microbatches, another memory setting, or a schedule that keeps fewer "
            "microbatches",
            least,
        )
    return best


def weigh(
    costs: ModelCosts, firsts: Sequence[int], request: ScheduleRequest, limits: Limits
) -> Solution:
    """What a step of given stages is predicted to take, whether they fit under the cap or not.

    Args:
        costs: of the model's blocks.
        firsts: the first block of every stage but the first; increasing.
        request: the schedule.
        limits: memory and links.

    Raises:
        PlanError: more stages than blocks.
        ScheduleError: see ``solve``.
    """
    return _Search(costs, len(firsts) + 1, request, limits).evaluate(tuple(firsts))


class _Search:
    """The search for one model's cuts under one schedule; arguments and errors are ``solve``'s."""

    def __init__(
        self, costs: ModelCosts, stages: int, request: ScheduleRequest, limits: Limits
    ) -> None:
        self._blocks = len(costs.blocks)
        if not 1 <= stages <= self._blocks:
            raise PlanError(
                f"cannot cut {self._blocks} blocks into {stages} stages: expected 1 to "
                f"{self._blocks} stages"
            )
        self._costs = costs
        self._stages = stages
        self._limits = limits
        self._build = request.prepare(stages)
        self._table = costs.table[:6]
        seconds = self._table[:3].sum(0)
        # A stage begins when the Fs before it are done, and then has all its work to do.
        before = self._table[0, 0].nan_to_num(0.0)
        self._ends = before[:, None] + request.microbatches * seconds
        self._known: dict[Firsts, Solution] = {}
        self._simulated = 0

    def evaluate(self, firsts: Firsts) -> Solution:
        """One way to cut, in a step between which ranks wait for each other, as a trainer's do."""
        if firsts in self._known:
            return self._known[firsts]
        begins, ends = self._edges(firsts)
        times, memory, parameters = self._table[:, begins, ends].split([3, 2, 1])
        seconds = [(f, i, w) for f, i, w in times.T.tolist()]
        schedule = replace(self._build(seconds), crosses_step=False)
        links = replace(
            self._limits.links,
            message_bytes={at: self._costs.crossing[k - 1] for at, k in enumerate(firsts)},
            gradient_bytes={at: self._costs.gradients[k - 1] for at, k in enumerate(firsts)},
        )
        costs = Costs(seconds, [StageMemory(*each) for each in memory.T.tolist()], links)
        timeline = costs.timeline(schedule)
        bubble = max(0.0, timeline.bubble_ratio())
        sizes = tuple(parameters[0].tolist())
        found = Solution(firsts, schedule, costs, sizes, timeline.makespan, bubble, ())
        moving, resting = peak_memory(schedule, costs.memory), found.resting(self._limits)
        peaks = tuple(map(sum, zip(moving, resting, strict=True)))
        self._known[firsts] = replace(found, peaks=peaks)
        self._simulated += sum(map(len, schedule.ranks))
        return self._known[firsts]

    def best(self, *, refine: bool) -> Solution:
        """The best of the starts, and of what shifting its cuts leads to."""
        for start in self._starts():
            if self.overflow(self.evaluate(start)) == 0.0 and not refine:
                break
        better: Solution | None = min(self._known.values(), key=self._key)
        while refine and better is not None:
            better = self._better(better)
        return min(self._known.values(), key=self._key)

    def overflow(self, found: Solution) -> float:
        """Bytes above the cap, over all ranks."""
        cap = self._limits.cap
        return math.fsum(peak - cap for peak in found.peaks if peak > cap * _SAME)

    def least(self) -> float:
        """The least cap under which something that was found fits."""
        return min(max(found.peaks) for found in self._known.values())

    def _key(self, found: Solution) -> tuple[float, float]:
        return self.overflow(found), found.step

    def _starts(self) -> Iterator[Firsts]:
        """Cuts to begin from, by dynamic programming."""
        yield from _even([self._ends] * self._stages)
        if math.isfinite(cap := self._limits.cap):
            held = self._held(next(iter(self._known.values())).schedule)
            yield from _even([torch.where(h <= cap * _SAME, self._ends, torch.inf) for h in held])
            if least := _divide(held, torch.maximum):
                yield least[1]

    def _held(self, order: Schedule) -> list[Table]:
        """The most that each stage makes its rank hold in this order, of every run of blocks."""
        found = []
        for stage, rank in enumerate(order.placement):
            own = (a.kind for a in order.ranks[rank] if a.stage == stage and a.kind in _KEPT)
            changes = [(0, 0), *map(_KEPT.__getitem__, own)]
            counts = torch.tensor(changes, dtype=torch.float64, device="cpu").cumsum(0)
            moving = torch.tensordot(counts.unique(dim=0), self._table[3:5], 1)
            found.append(moving.amax(0) + self._limits.factor * self._table[5])
        return found

    def _better(self, best: Solution) -> Solution | None:
        """Another way to cut, if one is found; the first to be tried is that whose slowest stage
        may be done the earliest.
        """
        longest = best.step * _SAME if self.overflow(best) == 0.0 else math.inf
        for way in sorted(self._shifted(best.firsts), key=self._earliest):
            if self._earliest(way) > longest or self._simulated > _WORK:
                break
            if way not in self._known and self._key(self.evaluate(way)) < self._key(best):
                return self._known[way]
        return None

    def _shifted(self, firsts: Firsts) -> Iterator[Firsts]:
        """The ways to cut to which runs of neighbouring cuts are shifted together."""
        for low, high in itertools.combinations(range(self._stages), 2):
            for shift in _SHIFTS:
                moved = (*firsts[:low], *(k + shift for k in firsts[low:high]), *firsts[high:])
                if all(a < b for a, b in itertools.pairwise((0, *moved, self._blocks))):
                    yield moved

    def _earliest(self, firsts: Firsts) -> float:
        """Seconds before which no step can be over."""
        return float(self._ends[self._edges(firsts)].max())

    def _edges(self, firsts: Firsts) -> tuple[list[int], list[int]]:
        """The first block of each stage, and the one behind its last."""
        return [0, *firsts], [*firsts, self._blocks]


def _even(costs: Sequence[Table]) -> Iterator[Firsts]:
    """The most even cuts whose slowest stage is little slower than it must be."""
    if found := _divide(costs, torch.maximum):
        for slack in _SLACKS:
            bound = found[0] * slack * _SAME
            squares = [torch.where(table <= bound, table * table, torch.inf) for table in costs]
            if even := _divide(squares, torch.add):
                yield even[1]


def _divide(
    costs: Sequence[Table], join: Callable[[Tensor, Tensor], Tensor]
) -> tuple[float, Firsts] | None:
    """The least of all stages' costs joined, and where its stages begin; None if no way may be.

    The best way to make the first j blocks into s stages is the best for s - 1 stages of the first
    i blocks, over all i < j, joined with blocks i to j as the last of them.
    """
    best = costs[0][0].nan_to_num(torch.inf, torch.inf)
    behind = []
    for cost in costs[1:]:
        best, begins = join(best[:, None], cost).nan_to_num(torch.inf, torch.inf).min(0)
        behind.append(begins)
    if not math.isfinite(best[-1]):
        return None
    firsts = [len(best) - 1]
    for begins in reversed(behind):
        firsts.append(int(begins[firsts[-1]]))
    return float(best[-1]), tuple(firsts[:0:-1])
