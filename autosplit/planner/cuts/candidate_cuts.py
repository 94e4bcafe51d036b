"""Candidate cuts for a schedule: starts by dynamic programming, improved by local search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autosplit.errors import PlanError, ScheduleError
from autosplit.pipeline.builders.placement.fill import StageTimes
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.planner.costs.block_costs import ModelCosts
from autosplit.planner.costs.limits import Limits

from .balance import StageCost, least_largest, least_uneven
from .local_search import Rank, count, descend, every, first_of
from .schedule_playback import Order
from .stage_costs import PrefixSums

_SLACKS = (1.0, 1.03, 1.1)  # how much longer than the least the slowest stage of a start may be
_EXHAUSTIVE = 4_000_000  # actions to play, below which every way to cut is tried
_ROUNDS = 4  # an order suits its cuts, and cuts their order: how often to go round
_ORDERS = 3  # of the best cuts so far, under which others are looked for
_SAME = 1 + 1e-9


@dataclass(frozen=True)
class Candidate:
    """Cuts with the schedule built for them, and what a step takes.

    Attributes:
        overflow: bytes above the cap, over all ranks.
        uneven: seconds of the slowest stage over those of the mean stage.
    """

    cuts: Tensor
    order: Order
    overflow: float
    step: float
    peaks: Tensor
    uneven: float

    @property
    def key(self) -> tuple[float, float]:
        return self.overflow, self.step


class CutSearch:
    """The search for one model's cuts under one schedule.

    Args:
        costs: of the model's blocks.
        stages: N.
        request: the schedule.
        limits: memory and links.

    Raises:
        PlanError: more stages than blocks, or none.
    """

    def __init__(
        self, costs: ModelCosts, stages: int, request: ScheduleRequest, limits: Limits
    ) -> None:
        if not 1 <= stages <= len(costs.blocks):
            raise PlanError(
                f"cannot cut {len(costs.blocks)} blocks into {stages} stages: expected 1 to "
                f"{len(costs.blocks)} stages"
            )
        self.costs = PrefixSums(costs)
        self.stages = stages
        self._request = request
        self._limits = limits
        self._noise = costs.noise

    def evaluate(self, cuts: Tensor) -> Candidate:
        """One way to cut, shape [S - 1]."""
        stages = self.costs.stages(cuts[None])
        times = triples(stages.times[:, :, 0])
        schedule = _schedule_for(self._request, self.stages, times)
        order = Order(schedule, self._limits.links, self._limits.factor)
        peaks = order.peaks(stages)
        overflow = float(self._overflow(peaks))
        seconds = stages.times[:, :, 0].sum(0)
        uneven = float(seconds.max() / seconds.mean()) if seconds.any() else 1.0
        return Candidate(cuts, order, overflow, float(order.steps(stages)), peaks[:, 0], uneven)

    def starts(self) -> Iterator[Tensor]:
        """Cuts to begin from, by dynamic programming."""
        found = least_largest(self._seconds, self.stages)
        if found is None:  # cannot be: there are as many blocks as stages
            raise PlanError(f"no way to cut into {self.stages} stages")
        cuts = torch.tensor(found[1], dtype=torch.int64)
        yield from self._near(self._seconds, found[0])
        if math.isinf(self._limits.cap):
            return
        order = self.evaluate(cuts).order
        if order.ranks == self.stages:
            fitting = self._fitting(order)
            held = least_largest(fitting, self.stages)
            if held is not None:
                yield from self._near(fitting, held[0])

    def _near(self, cost: StageCost, least: float) -> Iterator[Tensor]:
        """The most even cuts whose slowest stage is little slower than it must be."""
        for slack in _SLACKS:
            cuts = least_uneven(cost, self.stages, least * slack * _SAME)
            if cuts is not None:
                yield torch.tensor(cuts, dtype=torch.int64)

    def _seconds(self, stage: int) -> Tensor:
        return self.costs.table(first=stage == 0)[0].sum(0)

    def _bytes(self, order: Order, stage: int) -> Tensor:
        """The most that a stage makes its rank hold."""
        _, kept, parameters = self.costs.table(first=stage == 0)
        states = order.states(order.schedule.placement[stage])[:, [stage, self.stages + stage]]
        moving = torch.einsum("tk,kij->tij", torch.unique(states, dim=0), kept).amax(0)
        return moving + self._limits.factor * parameters

    def _fitting(self, order: Order) -> StageCost:
        def cost(stage: int) -> Tensor:
            fits = self._bytes(order, stage) <= self._limits.cap * _SAME
            return torch.where(fits, self._seconds(stage), torch.inf)

        return cost

    def best(self, starts: Sequence[Tensor], *, refine: bool) -> Candidate:
        """The best of the starts and of what is reached from them: the most even of those whose
        steps are within the noise of the shortest.
        """
        known = {tuple(cuts.tolist()): self.evaluate(cuts) for cuts in starts}
        tried: set[int] = set()
        for _ in range(_ROUNDS if refine and self.stages > 1 else 0):
            ways = sorted(known.values(), key=lambda candidate: candidate.key)[:_ORDERS]
            fresh = [candidate for candidate in ways if id(candidate) not in tried]
            if not fresh:
                break
            tried |= set(map(id, fresh))
            found = [cuts for candidate in fresh for cuts in self._improved(candidate, ways)]
            for cuts in found:
                if tuple(cuts.tolist()) not in known:
                    known[tuple(cuts.tolist())] = self.evaluate(cuts)
        best = min(known.values(), key=lambda candidate: candidate.key)
        bound = best.step * (1.0 + self._noise)
        near = [w for w in known.values() if w.overflow <= best.overflow and w.step <= bound]
        return (
            min(near, key=lambda candidate: (candidate.uneven, candidate.step))
            if self._noise
            else best
        )

    def _improved(self, candidate: Candidate, starts: Sequence[Candidate]) -> list[Tensor]:
        """Better cuts under the order of ``candidate``."""

        def rank(cuts: Tensor) -> Tensor:
            stages = self.costs.stages(cuts)
            overflow = self._overflow(candidate.order.peaks(stages))
            uneven = stages.times.sum(0).square().sum(0)
            return torch.stack([overflow, candidate.order.steps(stages), uneven])

        return self._search(candidate, [each.cuts for each in starts], rank)

    def frugal(self, candidate: Candidate) -> Candidate:
        """The cuts whose fullest rank holds least."""

        def rank(cuts: Tensor) -> Tensor:
            stages = self.costs.stages(cuts)
            peaks = candidate.order.peaks(stages)
            return torch.stack([peaks.amax(0), peaks.square().sum(0)])

        found = least_largest(lambda stage: self._bytes(candidate.order, stage), self.stages)
        starts = [candidate.cuts]
        if found is not None:
            starts.append(torch.tensor(found[1], dtype=torch.int64))
        cuts = _distinct([*self._search(candidate, starts, rank), *starts])
        ways = [self.evaluate(each) for each in cuts]
        return min(ways, key=lambda each: float(each.peaks.max()))

    def _search(self, candidate: Candidate, starts: Sequence[Tensor], rank: Rank) -> list[Tensor]:
        """All ways to cut where they are few, else what local search reaches."""
        blocks = self.costs.blocks
        if count(blocks, self.stages) * candidate.order.actions <= _EXHAUSTIVE:
            ways = every(blocks, self.stages)
            return [ways[first_of(rank(ways))]]
        return _distinct([descend(start, blocks, rank) for start in _distinct(starts)])

    def _overflow(self, peaks: Tensor) -> Tensor:
        """Bytes above the cap, over all ranks; shape [K]."""
        over = peaks - self._limits.cap
        return torch.where(over > self._limits.cap * 1e-9, over, 0.0).sum(0)


def triples(times: Tensor) -> list[tuple[float, float, float]]:
    """Of times of shape [3, S]."""
    return [(forward, inputs, weights) for forward, inputs, weights in times.T.tolist()]


def _distinct(ways: Sequence[Tensor]) -> list[Tensor]:
    """The ways to cut, each once, in their order."""
    return list({tuple(way.tolist()): way for way in ways}.values())


def _schedule_for(request: ScheduleRequest, stages: int, times: Sequence[StageTimes]) -> Schedule:
    """The schedule for stages with these times, where ranks wait for each other between steps, as
    a trainer's do.

    Raises:
        ScheduleError: what ``ScheduleRequest.build`` refuses, or two copies of the stages.
    """
    built = request.build(stages, times)
    if built.mirror is not None:
        raise ScheduleError(
            f"{request.name!r} runs two copies of every stage, for which nothing is planned: "
            "partition the model for another schedule, and give a trainer the result and this one"
        )
    return replace(built, crosses_step=False)
