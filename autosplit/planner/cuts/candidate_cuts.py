"""Candidate cuts for a schedule: starts by dynamic programming, improved by local search.

Dynamic programming over the blocks of a model in order: where to cut, stage by stage.

``best[s][j]`` is the best way to make the first j blocks into s stages: the best ``best[s-1][i]``
over all i < j, joined with blocks i to j as the last of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from autosplit.errors import PlanError, ScheduleError
from autosplit.pipeline.builders.families import SCHEDULES
from autosplit.pipeline.builders.placement.fill import StageTimes
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.planner.costs.block_costs import ModelCosts
from autosplit.planner.costs.limits import Limits

from .local_search import Rank, count, descend, every, first_of, moves
from .schedule_playback import Order
from .stage_costs import PrefixSums

StageCost = Callable[[int], Tensor]
"""What stage s costs if it begins before block i and ends before block j, shape [B + 1, B + 1];
infinite where it may not."""


def least_largest(cost: StageCost, stages: int) -> tuple[float, list[int]] | None:
    """The cuts whose most costly stage costs least, and what that costs; None if none may be."""
    return _divide(cost, stages, torch.maximum)


def least_uneven(cost: StageCost, stages: int, bound: float) -> list[int] | None:
    """The cuts with the least sum of squares over the stages, none of which exceeds ``bound``."""

    def squares(stage: int) -> Tensor:
        table = cost(stage)
        return torch.where(table <= bound, table * table, torch.inf)

    found = _divide(squares, stages, torch.add)
    return None if found is None else found[1]


def _divide(
    cost: StageCost, stages: int, join: Callable[[Tensor, Tensor], Tensor]
) -> tuple[float, list[int]] | None:
    """The least of all stages' costs joined, and its cuts: k cuts behind block k."""
    best = cost(0)[0].nan_to_num(torch.inf, torch.inf)
    behind = []
    for stage in range(1, stages):
        ways = join(best[:, None], cost(stage)).nan_to_num(torch.inf, torch.inf)
        best, begins = ways.min(0)
        behind.append(begins)
    value = float(best[-1])
    if not math.isfinite(value):
        return None
    cuts = []
    end = len(best) - 1
    for begins in reversed(behind):
        end = int(begins[end])
        cuts.append(end - 1)
    return value, cuts[::-1]


_SLACKS = (1.0, 1.03, 1.1)  # how much longer than the least the slowest stage of a start may be
_EXHAUSTIVE = 4_000_000  # actions to play, below which every way to cut is tried
_ROUNDS = 4  # an order suits its cuts, and cuts their order: how often to go round
_ORDERS = 3  # of the best cuts so far, under which others are looked for
_WORK = 400_000  # actions that local search plays for one schedule: seconds
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
        self._known: dict[tuple[int, ...], Candidate] = {}

    @cached_property
    def _built(self) -> Callable[[Sequence[StageTimes]], Schedule]:
        return _builder(self._request, self.stages)

    @cached_property
    def _moves(self) -> Tensor:
        return moves(self.stages - 1)

    def evaluate(self, cuts: Tensor) -> Candidate:
        """One way to cut, shape [S - 1], in a step between which ranks wait for each other, as a
        trainer's do.
        """
        key = tuple(cuts.tolist())
        if key not in self._known:
            self._known[key] = self._evaluate(cuts)
        return self._known[key]

    def _evaluate(self, cuts: Tensor) -> Candidate:
        stages = self.costs.stages(cuts[None])
        times = triples(stages.times[:, :, 0])
        schedule = replace(self._built(times), crosses_step=False)
        order = Order(schedule, self._limits.links, self._limits.factor)
        peaks = order.peaks(stages)
        overflow = float(self._overflow(peaks))
        seconds = stages.times[:, :, 0].sum(0)
        uneven = float(seconds.max() / seconds.mean()) if seconds.any() else 1.0
        return Candidate(cuts, order, overflow, float(order.steps(stages)), peaks[:, 0], uneven)

    def bound(self) -> float:
        """Seconds below which no step can be wherever the model is cut; nothing is built for it.

        On as many ranks as stages it is that of ``Order.bounds``, of the best cuts; on fewer, what
        a rank has to do in the mean.
        """
        count, ranks = self._request.microbatches, self._request.ranks or self.stages
        if ranks != self.stages:
            return count * self.costs.least_work(self.stages) / ranks
        split = self._request.split_backward
        ahead, behind = self.costs.before(split=split)

        def ends(stage: int) -> Tensor:
            forward, inputs, weights = self.costs.table(first=stage == 0)[0]
            backward = inputs if split else inputs + weights
            work, urgent = forward + inputs + weights, count * (forward + backward)
            return ahead[:, None] + torch.maximum(count * work, urgent + behind[:, None])

        found = least_largest(ends, self.stages)
        return 0.0 if found is None else found[0]

    def starts(self) -> Iterator[Tensor]:
        """Cuts to begin from, by dynamic programming."""
        found = least_largest(self._seconds, self.stages)
        if found is None:  # cannot be: there are as many blocks as stages
            raise PlanError(f"no way to cut into {self.stages} stages")
        cuts = torch.tensor(found[1], dtype=torch.int64)
        yield from self._near(self._seconds, found[0])
        if math.isinf(self._limits.cap) or self._request.ranks not in (None, self.stages):
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
        held = torch.unique(order.held(stage), dim=0)
        moving = torch.einsum("tk,kij->tij", held, kept).amax(0)
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
            if not fresh or not self._may_go_on():
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
            ways = (overflow == overflow.min()).nonzero()[:, 0]
            uneven = stages.times.sum(0).square().sum(0)
            return torch.stack([overflow, candidate.order.least(stages, ways), uneven])

        return self._search(candidate, [each.cuts for each in starts], rank)

    def is_hopeless(self, candidate: Candidate) -> bool:
        """Whether to take it that no cuts fit under the cap, where ways are too many to try all:
        the ranks hold more than that in the mean, and what one holds less another holds more.
        """
        over = float(candidate.peaks.mean()) > self._limits.cap
        return over and not self._is_small(candidate.order)

    def frugal(self, candidate: Candidate) -> Candidate:
        """The cuts whose fullest rank holds least. With one stage a rank, and more ways than can be
        tried, dynamic programming finds them.
        """

        def rank(cuts: Tensor) -> Tensor:
            stages = self.costs.stages(cuts)
            peaks = order.peaks(stages)
            order.played += order.actions
            return torch.stack([peaks.amax(0), peaks.square().sum(0)])

        order = candidate.order
        found = least_largest(lambda stage: self._bytes(order, stage), self.stages)
        starts = [candidate.cuts]
        if found is not None:
            starts.append(torch.tensor(found[1], dtype=torch.int64))
        if self._is_small(order) or order.ranks != self.stages:
            starts = [*self._search(candidate, starts, rank), *starts]
        cuts = _distinct(starts)
        ways = [self.evaluate(each) for each in cuts]
        return min(ways, key=lambda each: float(each.peaks.max()))

    def _search(self, candidate: Candidate, starts: Sequence[Tensor], rank: Rank) -> list[Tensor]:
        """All ways to cut where they are few, else what local search reaches."""
        blocks = self.costs.blocks
        if self._is_small(candidate.order):
            ways = every(blocks, self.stages)
            return [ways[first_of(rank(ways))]]
        return _distinct(
            [
                descend(start, blocks, self._moves, rank, self._may_go_on)
                for start in _distinct(starts)
            ]
        )

    def _is_small(self, order: Order) -> bool:
        """Whether every way to cut can be tried."""
        return count(self.costs.blocks, self.stages) * order.actions <= _EXHAUSTIVE

    def _may_go_on(self) -> bool:
        return sum(each.order.played for each in self._known.values()) < _WORK

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


def _builder(request: ScheduleRequest, stages: int) -> Callable[[Sequence[StageTimes]], Schedule]:
    """What builds the schedule for stages with any times.

    Raises:
        ScheduleError: what ``ScheduleRequest.build`` refuses, or two copies of the stages.
    """
    there = request.schedule
    known = there if isinstance(there, Schedule) else SCHEDULES.get(there)
    twice = known.mirror is not None if isinstance(known, Schedule) else known and known.copies > 1
    if twice:
        raise ScheduleError(
            f"{request.name!r} runs two copies of every stage, for which nothing is planned: "
            "partition the model for another schedule, and give a trainer the result and this one"
        )
    return request.prepare(stages)
