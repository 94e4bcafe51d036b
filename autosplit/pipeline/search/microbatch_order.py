"""Search for the best order of microbatches of different sizes, and each rank's actions for that
order.

    orders of the microbatches   short ones at both ends, long ones between, and a few others
    actions of each rank         list scheduling in time: of the F and I that can start, the one
                                 with the most work after it; a W where the rank would wait; or the
                                 rank waits for an F or I that soon can start, if that has more
    the shortest step            then with one microbatch at another place, while that helps
    named schedules              in the order of the list, and sorted by length

F and W run in one order of microbatches on all stages: gradients and statistics are those of one
process that runs the microbatches one after another in that order. Each action is placed after its
needs, so the step ends. The search counts its work in actions, not in seconds: ranks with equal
costs find equal schedules without exchanging messages.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, product
from operator import neg, sub
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.placement import StageTimes
from autosplit.pipeline.schedule.schedule import SPLIT_KINDS, Action, ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING
from autosplit.pipeline.simulation.playing import ListScheduler, play
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import StepGraph

from .bounding import caps_of
from .search import named_schedules

_FORWARD = 0.5  # the weight of the work after an F, relative to the work after an I
_WORK = 5_000  # actions to place; the last order is placed whole
_CLOSE = 1.005  # a step up to this much above the work of the slowest rank is not improved
_SKIPPED = ("naive", "zb-h1")  # never the shortest; another form of 1f1b
_ENDS = [(0.5, 0.06), (0.7, 0.2), (0.85, 0.06), (1.0, 0.0)]
"""Shares of the microbatches, the shortest ones, that run first and last."""
_TRIALS = [(0, math.inf), (1, math.inf), (2, 1.0), (3, 0.5), (0, 3.0), (1, 3.0)]
"""(index in ``_ENDS``, patience) of the orders that are constructed first. With a patience of p, a
rank waits up to a second to start an action p seconds earlier."""

Rows = Sequence[Sequence[int]]


class _Step(NamedTuple):
    """A step: its seconds, its microbatches in order, and the actions of each rank. Actions are
    numbered by kind, stage and place in the order.
    """

    seconds: float
    order: Sequence[int]
    rows: Rows
    patience: float = math.inf


def _column(costs: Costs) -> tuple[list[float], list[float], list[float]]:
    """The costs of one microbatch, each by kind and stage: (seconds of the action, bytes by which
    it changes its rank's memory, weighted seconds of the chain of F and I that begins with it).

    From F to I, a microbatch counts the larger of its saved and its deferred bytes; from I to W,
    its deferred bytes.
    """
    f, i, w = zip(*costs.times, strict=True)
    backward = [*accumulate(i)]
    chains = [*accumulate(f[::-1], initial=backward[-1])][:0:-1]
    kept = [max(memory.saved, memory.deferred) for memory in costs.memory]
    deferred = [memory.deferred for memory in costs.memory]
    return (
        [*f, *i, *w],
        [*kept, *map(sub, deferred, kept), *map(neg, deferred)],
        [*(_FORWARD * seconds for seconds in chains), *backward, *([-1.0] * len(w))],
    )


class MicrobatchOrders:
    """Finds the shortest step for a list of microbatches. Messages between ranks are assumed to
    take no time.

    Args:
        placement: the rank of every stage.
        times: per stage, (F, I, W) of a usual microbatch, for which named schedules are built.
    """

    def __init__(self, placement: Sequence[int], times: Sequence[StageTimes]) -> None:
        self._placement, self._times = tuple(placement), times
        self._ranks = max(placement) + 1
        self._prepared: dict[int, tuple[StepGraph, list[Rows]]] = {}

    def find(self, costs: Sequence[Costs], cap: float | Sequence[float] = math.inf) -> Schedule:
        """Find the schedule with the shortest step for a list of microbatches; deterministic.

        Its step is at most half a percent longer than that of any named schedule except ``naive``
        with this placement. That holds for the named schedules that keep the cap, with microbatches
        in the order of the list or sorted by length.

        Args:
            costs: per microbatch, the costs of every stage; only times and memory are used.
            cap: the most bytes that a rank may keep of the microbatches: one number, or one for
                each rank.

        Returns:
            A schedule named ``"auto"``, whose microbatches are the places in the list.

        Raises:
            ScheduleError: the list is empty, or no order keeps the cap; the text then names the
                largest microbatch.
        """
        if not costs:
            raise ScheduleError(
                "find(costs) got an empty list: pass costs of at least one microbatch"
            )
        graph, named = self._prepare(len(costs))
        search = _OrderSearch(graph, costs, self._placement, caps_of(cap, self._ranks))
        best = search.run(named)
        rows = tuple(
            tuple(
                Action(action.stage, action.kind, best.order[action.microbatch])
                for action in map(graph.actions.__getitem__, row)
            )
            for row in best.rows
        )
        return Schedule("auto", len(self._placement), len(costs), rows, self._placement, True)

    def _prepare(self, count: int) -> tuple[StepGraph, list[Rows]]:
        """Return (step graph of ``count`` microbatches, rows of the named schedules). In the rows,
        I and W stand for a full backward, which takes the same time.
        """
        if count not in self._prepared:
            stages = len(self._placement)
            parts = product(SPLIT_KINDS, range(stages), range(count))
            numbers = {Action(s, kind, m): n for n, (kind, s, m) in enumerate(parts)}
            empty = Schedule("auto", stages, count, ((),) * self._ranks, self._placement, True)
            graph = StepGraph(empty, [(self._placement[a.stage], a) for a in numbers])
            named: list[Schedule] = []
            with contextlib.suppress(ScheduleError):  # none has this placement
                named = named_schedules(self._times, count, self._ranks, self._placement)
            distinct = {
                schedule.ranks: [
                    [numbers[part] for action in row for part in _halves(action)]
                    for row in schedule.ranks
                ]
                for schedule in named
                if schedule.name not in _SKIPPED
            }
            self._prepared[count] = graph, [*distinct.values()]
        return self._prepared[count]


def _halves(action: Action) -> list[Action]:
    """[I, W] for a full backward; [action] for any other action."""
    if action.kind is not ActionKind.BACKWARD:
        return [action]
    return [replace(action, kind=kind) for kind in SPLIT_KINDS[1:]]


class _OrderSearch:
    """The search for one list of microbatches.

    Args:
        graph: the actions by kind, stage and place in an order of the list.
        costs: per microbatch, the costs of every stage.
        placement: the rank of every stage.
        caps: per rank, the most bytes that it may keep.
    """

    def __init__(
        self,
        graph: StepGraph,
        costs: Sequence[Costs],
        placement: Sequence[int],
        caps: Sequence[float],
    ) -> None:
        self._graph, self._columns = graph, [*map(_column, costs)]
        self._caps = [cap * ROUNDING for cap in caps]
        stages = len(placement)
        # Per rank, the next of these kinds: F nearest to the loss, I nearest to the first stage, W.
        self._queues = [
            [
                [2 * stages + s for s in stages_here],
                [stages + s for s in stages_here],
                [*reversed(stages_here)],
            ]
            for stages_here in (
                [s for s, at in enumerate(placement) if at == r] for r in range(len(caps))
            )
        ]
        totals = [*map(sum, zip(*(seconds for seconds, *_ in self._columns), strict=True))]
        self._busy = [sum(totals[task] for task in chain(*tasks)) for tasks in self._queues]
        self._best = _Step(math.inf, (), ())
        self._work = _WORK

    def run(self, named: Sequence[Rows]) -> _Step:
        """Return the shortest step of all orders; ``named`` are the rows of named schedules.

        Raises:
            ScheduleError: no order keeps the caps.
        """
        list_order, *orders = _orders([sum(seconds) for seconds, *_ in self._columns])
        for number, patience in _TRIALS:
            if self._work > 0 and self._is_long:
                self._construct(orders[number], patience)
        for order, rows in product((list_order, orders[-1]), named):
            if self._is_long:
                self._replay(order, rows)
        if not self._best.rows:
            self._construct(list_order, math.inf)
        if not self._best.rows:
            raise self._refusal()
        draw, count = random.Random(0).randrange, len(self._columns)
        while self._work > 0 and self._is_long:
            order = [*self._best.order]
            order.insert(draw(count), order.pop(draw(count)))
            self._construct(order, self._best.patience)
        return self._best

    @property
    def _is_long(self) -> bool:
        return self._best.seconds > _CLOSE * max(self._busy)

    def _refusal(self) -> ScheduleError:
        sizes = [max(change) for _, change, _ in self._columns]
        return ScheduleError(
            f"no order of the microbatches keeps the limit of {min(self._caps):,.0f}: microbatch "
            f"{sizes.index(max(sizes))}, the largest, keeps {max(sizes):,.0f} on one stage. Cut it "
            "into smaller ones, raise the limit, or use more ranks"
        )

    def _construct(self, order: Sequence[int], patience: float) -> None:
        """Place the actions of an order in time; stop when its step can no longer be the
        shortest.
        """
        count, caps = len(order), self._caps
        seconds, change, remaining = self._by_number(order)
        progress, kept = [0] * (len(seconds) // count), [0.0] * len(caps)
        spare = [self._best.seconds - busy for busy in self._busy]
        scheduler = ListScheduler(self._graph, seconds, len(caps))
        ready, ends = scheduler.ready, scheduler.ends

        def shorter(rank: int, now: float, latest: float) -> int:
            """Of the actions that would end in time, the one with the most work after it; -1 if
            there is none.
            """
            chosen, most = -1, -2.0
            room = caps[rank] - kept[rank]
            for task in chain(*self._queues[rank]):
                number = task * count + progress[task]
                if (
                    progress[task] < count
                    and change[number] <= room
                    and remaining[number] > most
                    and now + seconds[number] <= latest
                    and ready(number) <= now
                ):
                    chosen, most = number, remaining[number]
            return chosen

        def choose(rank: int, now: float) -> int | None:
            """The F or I with the most work after it, else a W; None to wait."""
            room, chosen, most = caps[rank] - kept[rank], -1, -2.0
            arrival, urgent = math.inf, -2.0
            for tasks in self._queues[rank]:
                for task in tasks:
                    number = task * count + progress[task]
                    if progress[task] == count or change[number] > room:
                        continue
                    start = ready(number)
                    if start <= now:
                        if remaining[number] > most:
                            chosen, most = number, remaining[number]
                        break
                    if start < math.inf and remaining[number] > urgent:
                        arrival, urgent = start, remaining[number]
            if chosen < 0 or not spare:
                return None
            latest = arrival + patience * (arrival - now)
            if urgent > most and now + seconds[chosen] > latest:
                chosen = shorter(rank, now, latest)
                if chosen < 0:
                    return None
            spare[rank] -= now - ends[rank]
            if spare[rank] < 0.0:
                spare.clear()  # a rank has waited for too long
                return None
            progress[chosen // count] += 1
            kept[rank] += change[chosen]
            return chosen

        scheduler.run(choose)
        self._work -= sum(progress)
        if sum(progress) == len(seconds) and max(ends) < self._best.seconds:
            self._best = _Step(max(ends), order, scheduler.rows, patience)

    def _replay(self, order: Sequence[int], rows: Rows) -> None:
        """Run the rows of a named schedule on an order, if they keep the caps."""
        seconds, change, *_ = self._by_number(order)
        for row, cap in zip(rows, self._caps, strict=True):
            if max(accumulate(map(change.__getitem__, row))) > cap:
                return
        makespan = play(self._graph, rows, seconds).makespan
        if makespan < self._best.seconds:
            self._best = _Step(makespan, order, rows)

    def _by_number(self, order: Sequence[int]) -> list[list[float]]:
        """The costs of microbatches in an order, as lists by the number of the action."""
        columns = (self._columns[microbatch] for microbatch in order)
        fields = zip(*columns, strict=True)
        return [[*chain.from_iterable(zip(*rows, strict=True))] for rows in fields]


def _orders(lengths: Sequence[float]) -> Iterator[list[int]]:
    """Yield orders of microbatches: the order of the list, then one for each row of ``_ENDS``; the
    last of them is sorted by length.
    """
    ascending = sorted(range(len(lengths)), key=lengths.__getitem__)
    yield [*range(len(lengths))]
    for first, last in _ENDS:
        begin, end = round(first * len(lengths)), round((first + last) * len(lengths))
        middle = ascending[end:]
        yield [
            *ascending[:begin],
            *middle[::2],
            *middle[1::2][::-1],
            *ascending[begin:end][::-1],
        ]
