"""Where to cut a model so that a step of a schedule is short.

Dynamic programming over the blocks gives cuts to start from. Under the order of the schedule that
is built for them, cuts are then shifted while that makes the step shorter, or all are tried where
they are few; the schedule is built anew for what is found, and so on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from autosplit.errors import PlanError, ScheduleError
from autosplit.pipeline.builders.families import SCHEDULES
from autosplit.pipeline.builders.placement import StageTimes
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.routes import Parcel
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.search.within_memory import MeasureEffect
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.playing import play, rows_of
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import Message, StepGraph
from autosplit.pipeline.simulation.timeline import Timeline

from .costs import Limits, ModelCosts

_SLACKS = (1.0, 1.03, 1.1)  # how much longer than the least the slowest stage of a start may be
_EXHAUSTIVE = 200_000  # actions to play, below which every way to cut is tried
_ROUNDS = 4  # an order suits its cuts, and cuts their order: how often to go round
_ORDERS = 3  # of the best cuts so far, under which others are looked for
_WORK = 2_000_000  # actions that are played for one schedule: seconds
_SHIFTS = (1, 2, 4, 8)  # blocks by which cuts are moved
_FAR = 1.25  # times a known step; no start has a faster slowest stage than the first
_SAME = 1 + 1e-9
_KINDS = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 2,
    ActionKind.BACKWARD: 3,
}
_KEPT = ((1, 0), (-1, 1), (0, -1), (-1, 0))  # saved and deferred microbatches that each adds

Table = Tensor
"""What a stage costs that begins before block i and ends before block j, [B + 1, B + 1]; infinite
where it may not."""
Rank = Callable[[Tensor], Tensor]
"""Of ways to cut, shape [K, S - 1], what to make small, the most important first: [n, K]."""


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

    def resting(self, limits: Limits) -> list[float]:
        """Bytes of each rank for parameters, gradients and optimizer state."""
        found = [0.0] * len(self.schedule.ranks)
        for stage, rank in enumerate(self.schedule.placement):
            found[rank] += limits.factor * self.parameters[stage]
        return found

    def under(
        self, schedule: Schedule, timeline: Timeline, moving: Sequence[float], limits: Limits
    ) -> Solution:
        """The same stages under another schedule, in which ranks hold so much of microbatches."""
        return replace(
            self,
            schedule=schedule,
            step=timeline.makespan,
            bubble=max(0.0, timeline.bubble_ratio()),
            peaks=tuple(map(sum, zip(moving, self.resting(limits), strict=True))),
        )


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
    search = _Search(costs, stages, request, limits)
    best = search.first
    if search.overflow(best) == 0.0 and best.step > _FAR * rival:
        return best
    if not search.is_hopeless(best):
        best = search.best(search.starts(), refine=refine)
        if search.overflow(best) > 0.0:
            frugal = search.frugal(best)
            fits = search.overflow(frugal) == 0.0
            best = search.best([frugal.cuts], refine=refine) if fits else frugal
    if search.overflow(best) > 0.0:
        least = max(best.peaks)
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
    costs: ModelCosts, cuts: Sequence[int], request: ScheduleRequest, limits: Limits
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
    return _Search(costs, len(cuts) + 1, request, limits).evaluate(cuts)


class _Search:
    """The search for one model's cuts under one schedule; arguments and errors are ``solve``'s."""

    def __init__(
        self, costs: ModelCosts, stages: int, request: ScheduleRequest, limits: Limits
    ) -> None:
        if not 1 <= stages <= len(costs.blocks):
            raise PlanError(
                f"cannot cut {len(costs.blocks)} blocks into {stages} stages: expected 1 to "
                f"{len(costs.blocks)} stages"
            )
        self._costs = costs
        self._stages = stages
        self._request = request
        self._limits = limits
        self._build = _builder(request, stages)
        self._known: dict[tuple[int, ...], Solution] = {}
        self._orders: dict[tuple[int, ...], _Order] = {}
        rows = torch.tensor([astuple(block) for block in costs.blocks], dtype=torch.float64).T
        self._sums = torch.cat([torch.zeros(len(rows), 1, dtype=torch.float64), rows.cumsum(1)], 1)
        # Nothing crosses the end of the model.
        self._crossing = torch.tensor((*costs.crossing, 0.0), dtype=torch.float64)
        self._returning = torch.tensor((*costs.gradients, 0.0), dtype=torch.float64)

    def _runs(self, begins: Tensor, ends: Tensor) -> Tensor:
        """Runs of blocks as stages: F, I, W, saved, deferred and parameters, [6, ...]. A first
        stage's W is the whole backward, and waits with all that F saved and with the gradient of
        what it puts out.
        """
        pieces = (self._sums[:, ends] - self._sums[:, begins]).clamp_(min=0.0)  # rounding
        found, call, first = pieces[:6].clone(), self._costs.call, begins == 0
        found[:3] += call
        found[1].masked_fill_(first.expand_as(found[1]), 0.0)
        found[2] = torch.where(first, pieces[6] + call, found[2])
        found[4] = torch.where(first, found[3] + self._returning[ends - 1], found[4])
        return found

    def _of(self, ways: Tensor) -> Tensor:
        """The stages of ways to cut, shape [K, S - 1]: [6, S, K]."""
        ends = torch.full((self._stages + 1, len(ways)), len(self._costs.blocks))
        ends[0], ends[1:-1] = 0, ways.T + 1
        return self._runs(ends[:-1], ends[1:])

    @cached_property
    def _table(self) -> Tensor:
        """Every run of blocks as a stage, [6, B + 1, B + 1]; empty runs are NaN."""
        places = torch.arange(len(self._costs.blocks) + 1)
        table = self._runs(places[:, None], places[None])
        table[:, places[:, None] >= places] = torch.nan
        return table

    def evaluate(self, cuts: Sequence[int]) -> Solution:
        """One way to cut, in a step between which ranks wait for each other, as a trainer's do."""
        cuts = tuple(cuts)
        if cuts not in self._known:
            self._known[cuts] = self._evaluate(cuts)
        return self._known[cuts]

    def _evaluate(self, cuts: tuple[int, ...]) -> Solution:
        way = torch.tensor([cuts], dtype=torch.int64)
        stages = self._of(way)
        times = [(f, i, w) for f, i, w in stages[:3, :, 0].T.tolist()]
        schedule = replace(self._build(times), crosses_step=False)
        order = self._orders[cuts] = _Order(schedule, self._limits)
        crossing, returning = self._messages(way[0])
        step = order.step(times, crossing, returning)
        busy = schedule.microbatches * sum(map(sum, times))
        ranks = len(schedule.ranks)
        return Solution(
            cuts,
            schedule,
            Costs(
                times,
                [StageMemory(*each) for each in stages[3:5, :, 0].T.tolist()],
                replace(self._limits.links, message_bytes=crossing, gradient_bytes=returning),
            ),
            tuple(stages[5, :, 0].tolist()),
            step,
            max(0.0, 1.0 - busy / (step * ranks)) if step else 0.0,
            tuple(order.peaks(stages)[:, 0].tolist()),
        )

    def _messages(self, way: Tensor) -> tuple[dict[int, float], dict[int, float]]:
        """Bytes over each cut, and of the gradients that come back over it."""
        crossing, returning = self._crossing[way].tolist(), self._returning[way].tolist()
        return dict(enumerate(crossing)), dict(enumerate(returning))

    @cached_property
    def first(self) -> Solution:
        """The most even cuts whose slowest stage is as fast as can be."""
        return self.evaluate(next(self._near(lambda stage: self._table[:3].sum(0))))

    def starts(self) -> Iterator[Sequence[int]]:
        """Cuts to begin from, by dynamic programming."""
        seconds = self._table[:3].sum(0)
        yield from self._near(lambda stage: seconds)
        order = self._orders[self.first.cuts]
        if math.isfinite(self._limits.cap) and order.one_each:
            cap = self._limits.cap * _SAME
            yield from self._near(
                lambda stage: torch.where(order.held(self._table, stage) <= cap, seconds, torch.inf)
            )

    def _near(self, cost: Callable[[int], Table]) -> Iterator[Sequence[int]]:
        """The most even cuts whose slowest stage is little slower than it must be."""
        found = _divide(cost, self._stages, torch.maximum)
        for slack in _SLACKS if found else ():
            bound = found[0] * slack * _SAME if found else 0.0

            def squares(stage: int, bound: float = bound) -> Table:
                table = cost(stage)
                return torch.where(table <= bound, table * table, torch.inf)

            if even := _divide(squares, self._stages, torch.add):
                yield even[1]

    def best(self, starts: Iterable[Sequence[int]], *, refine: bool) -> Solution:
        """The best of the starts and of what is reached from them: the most even of those whose
        steps are within the noise of the shortest.
        """
        known = {found.cuts: found for found in map(self.evaluate, starts)}
        tried: set[tuple[int, ...]] = set()
        for _ in range(_ROUNDS if refine and self._stages > 1 else 0):
            ways = sorted(known.values(), key=self._key)[:_ORDERS]
            fresh = [way for way in ways if way.cuts not in tried]
            if not fresh or not self._may_go_on():
                break
            tried |= {way.cuts for way in fresh}
            for way in fresh:
                order = self._orders[way.cuts]
                found = self._search(order, [w.cuts for w in ways], self._by_step(order))
                known.update((cuts, self.evaluate(cuts)) for cuts in found)
        best = min(known.values(), key=self._key)
        longest, over = best.step * (1.0 + self._costs.noise), self.overflow(best)
        near = [w for w in known.values() if self.overflow(w) <= over and w.step <= longest]
        return min(near, key=lambda w: (w.uneven, w.step)) if self._costs.noise else best

    def _key(self, found: Solution) -> tuple[float, float]:
        return self.overflow(found), found.step

    def overflow(self, found: Solution) -> float:
        """Bytes above the cap, over all ranks."""
        return float(self._over(torch.tensor(found.peaks, dtype=torch.float64)[:, None]))

    def _over(self, peaks: Tensor) -> Tensor:
        over = peaks - self._limits.cap
        return torch.where(over > self._limits.cap * 1e-9, over, 0.0).sum(0)

    def is_hopeless(self, found: Solution) -> bool:
        """Whether to take it that no cuts fit under the cap, where ways are too many to try all:
        the ranks hold more than that in the mean, and what one holds less another holds more.
        """
        over = math.fsum(found.peaks) > self._limits.cap * len(found.peaks)
        return over and not self._few(self._orders[found.cuts])

    def frugal(self, found: Solution) -> Solution:
        """The cuts whose fullest rank holds least, under the order of ``found``. With one stage a
        rank, and more ways than can be tried, dynamic programming finds them.
        """
        order = self._orders[found.cuts]

        def rank(ways: Tensor) -> Tensor:
            peaks = order.peaks(self._of(ways))
            return torch.stack([peaks.amax(0), peaks.square().sum(0)])

        starts = [found.cuts]
        if even := _divide(lambda s: order.held(self._table, s), self._stages, torch.maximum):
            starts.append(tuple(even[1]))
        if self._few(order) or not order.one_each:
            starts += self._search(order, starts, rank)
        return min(map(self.evaluate, starts), key=lambda each: max(each.peaks))

    def _by_step(self, order: _Order) -> Rank:
        """Bytes over the cap, seconds of a step and unevenness. Only of ways with the fewest bytes
        over it are steps played, the least bound first, as far as one may be the shortest.
        """

        def rank(ways: Tensor) -> Tensor:
            stages = self._of(ways)
            overflow = self._over(order.peaks(stages))
            bounds, steps = order.bounds(stages), torch.full_like(overflow, torch.inf)
            bounds[overflow > overflow.min()] = torch.inf
            shortest = math.inf
            for at in bounds.argsort(stable=True).tolist():
                if not bounds[at] <= min(shortest, 1e300) * _SAME:
                    break
                times = stages[:3, :, at].T.tolist()
                steps[at] = order.step(times, *self._messages(ways[at]))
                shortest = min(shortest, float(steps[at]))
            return torch.stack([overflow, steps, stages[:3].sum(0).square().sum(0)])

        return rank

    def _search(
        self, order: _Order, starts: Sequence[tuple[int, ...]], rank: Rank
    ) -> list[tuple[int, ...]]:
        """The best of all ways to cut where they are few, else what is reached from the starts by
        shifts that help.
        """
        if self._few(order):
            every = [*itertools.combinations(range(len(self._costs.blocks) - 1), self._stages - 1)]
            ways = torch.tensor(every, dtype=torch.int64).reshape(len(every), self._stages - 1)
            return [tuple(ways[_first(rank(ways))[0]].tolist())]
        return [self._descend(start, rank) for start in dict.fromkeys(starts)]

    def _descend(self, start: tuple[int, ...], rank: Rank) -> tuple[int, ...]:
        best = torch.tensor(start, dtype=torch.int64)
        _, value = _first(rank(best[None]))
        while len(best) and self._may_go_on():
            ways = best + _moves(len(best))
            ends = [ways.new_full((len(ways), 1), end) for end in (-1, len(self._costs.blocks) - 1)]
            ways = ways[(torch.cat([ends[0], ways, ends[1]], 1).diff(dim=1) > 0).all(1)]
            if not len(ways):
                break
            at, found = _first(rank(ways))
            if found >= value:
                break
            best, value = ways[at], found
        return tuple(best.tolist())

    def _few(self, order: _Order) -> bool:
        """Whether every way to cut can be tried."""
        ways = math.comb(len(self._costs.blocks) - 1, self._stages - 1)
        return ways * len(order.actions) <= _EXHAUSTIVE

    def _may_go_on(self) -> bool:
        return sum(order.played for order in self._orders.values()) < _WORK


class _Order:
    """The order of a legal schedule with one copy of its stages, for the stages of any cuts: the
    times are those of ``pipeline.simulate``, the bytes those of ``pipeline.peak_memory``.

    Attributes:
        played: how many actions were.
        one_each: whether every rank has one stage.
    """

    def __init__(self, schedule: Schedule, limits: Limits) -> None:
        self.schedule = schedule
        self.played = 0
        self._limits = limits
        self.actions = [action for row in schedule.ranks for action in row]
        self._rows = rows_of(schedule)
        self._own: list[list[int]] = [[] for _ in schedule.ranks]
        for stage, rank in enumerate(schedule.placement):
            self._own[rank].append(stage)
        self.one_each = all(len(own) == 1 for own in self._own)
        self._moments = [
            torch.tensor(_moments(row, own), dtype=torch.float64)
            for row, own in zip(schedule.ranks, self._own, strict=True)
        ]

    def step(
        self,
        times: Sequence[StageTimes],
        crossing: dict[int, float],
        returning: dict[int, float],
    ) -> float:
        """Seconds of a step, ranks waiting for each other at its end."""
        self.played += len(self.actions)
        table = [(f, i, w, i + w) for f, i, w in times]
        seconds = [table[action.stage][_KINDS[action.kind]] for action in self.actions]
        sizes, graph = (returning, crossing), self._graph
        for number, sent in self._sent:
            graph.makes[number] = tuple(
                message._replace(took=sizes[parcel.forward][parcel.boundary] / bandwidth)
                for message, parcel, bandwidth in sent
            )
        return play(graph, self._rows, seconds).makespan

    @cached_property
    def _graph(self) -> StepGraph:
        links = replace(self._limits.links, message_bytes=0.0, gradient_bytes=None)
        return StepGraph(self.schedule, transfer=links, own_needs=False)

    @cached_property
    def _sent(self) -> list[tuple[int, list[tuple[Message, Parcel, float]]]]:
        """By the action that sends them, messages that take time for their size, with the bandwidth
        of their links: all that differs from cut to cut in the graph.
        """
        graph, links = self._graph, self._limits.links
        found = []
        for number, messages in enumerate(graph.makes):
            sent = [
                (m, graph.parcels[m.parcel], links.link(*m.link)[1] if m.link else math.inf)
                for m in messages
            ]
            if any(math.isfinite(bandwidth) for *_, bandwidth in sent):
                found.append((number, sent))
        return found

    def bounds(self, stages: Tensor) -> Tensor:
        """Seconds below which no step of this kind can be; shape [K].

        A rank begins when the Fs before its first stage are done. It then has all its work to do;
        and behind the last of its gradients come those of the stages before, and the first's W.
        """
        forward, inputs, weights = stages[:3]
        split, count = self.schedule.split_backward, self.schedule.microbatches
        backward = inputs if split else inputs + weights
        last = weights[0] if split else 0.0
        lead, tail = forward.cumsum(0) - forward, backward.cumsum(0) - backward
        bounds = []
        for own in filter(None, self._own):
            urgent = count * (forward[own] + backward[own]).sum(0) + tail[own[0]] + last
            work = count * stages[:3, own].sum((0, 1))
            bounds.append(lead[own[0]] + torch.maximum(work, urgent))
        return torch.stack(bounds).amax(0)

    def peaks(self, stages: Tensor) -> Tensor:
        """The most that each rank holds at once, parameters and all; shape [P, K]."""
        moving = [
            (moments @ stages[3:5, own].flatten(0, 1)).amax(0)
            for moments, own in zip(self._moments, self._own, strict=True)
        ]
        still = [self._limits.factor * stages[5, own].sum(0) for own in self._own]
        return torch.stack(moving) + torch.stack(still)

    def held(self, table: Tensor, stage: int) -> Table:
        """The most that a stage makes its rank hold, of every run of blocks."""
        rank = self.schedule.placement[stage]
        own, at = self._own[rank], self._own[rank].index(stage)
        moments = torch.unique(self._moments[rank][:, [at, len(own) + at]], dim=0)
        moving = torch.einsum("tk,kij->tij", moments, table[3:5]).amax(0)
        return moving + self._limits.factor * table[5]


def _moments(row: Sequence[Action], own: Sequence[int]) -> list[tuple[int, ...]]:
    """What a rank holds between its actions: how many microbatches of each of its stages are saved,
    then how many are deferred; each once.

    While an I runs, both what it reads and what it makes may be the larger, and so may be each
    moment before and behind it: the most over all moments is the same.
    """
    now = [0] * (2 * len(own))
    found = {tuple(now)}
    for action in row:
        for part, more in enumerate(_KEPT[_KINDS[action.kind]]):
            now[part * len(own) + own.index(action.stage)] += more
        found.add(tuple(now))
    return sorted(found)


def _divide(
    cost: Callable[[int], Table], stages: int, join: Callable[[Tensor, Tensor], Tensor]
) -> tuple[float, list[int]] | None:
    """The least of all stages' costs joined, and its cuts: k cuts behind block k; None if no way
    may be. The best way to make the first j blocks into s stages is the best for s - 1 stages of
    the first i blocks, over all i < j, joined with blocks i to j as the last of them.
    """
    best = cost(0)[0].nan_to_num(torch.inf, torch.inf)
    behind = []
    for stage in range(1, stages):
        best, begins = join(best[:, None], cost(stage)).nan_to_num(torch.inf, torch.inf).min(0)
        behind.append(begins)
    if not math.isfinite(best[-1]):
        return None
    cuts, end = [], len(best) - 1
    for begins in reversed(behind):
        end = int(begins[end])
        cuts.append(end - 1)
    return float(best[-1]), cuts[::-1]


def _first(values: Tensor) -> tuple[int, list[float]]:
    """The column that comes first in the order of the rows, and its values."""
    columns = values.T.tolist()
    least = min(columns)
    return columns.index(least), least


def _moves(cuts: int) -> Tensor:
    """All moves of so many cuts, in order: of a run of neighbouring cuts together, or of two cuts
    apart or towards each other; shape [n, S - 1].
    """
    places = torch.arange(cuts)
    pairs = torch.combinations(places, with_replacement=True)
    first, last = pairs[:, :1], pairs[:, 1:]
    runs = ((first <= places) & (places <= last)).long()
    apart = ((places == last).long() - (places == first).long())[pairs[:, 0] < pairs[:, 1]]
    shifts = [sign * size * runs for size in _SHIFTS for sign in (1, -1)]
    found: Tensor = torch.unique(torch.cat([*shifts, apart, -apart]), dim=0)
    return found


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
