"""The scheduling problem: all actions of a step with what they take and keep, under caps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import Journey
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.activation_memory import ROUNDING, PeakMemory
from autosplit.pipeline.simulation.lanes import add_lanes
from autosplit.pipeline.simulation.playing import Play, play
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import StepGraph

KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
    ActionKind.BACKWARD,
    ActionKind.RECOMPUTE,
)
FORWARD, INPUT, WEIGHT, FULL, _ = KINDS

Row = tuple[Action, ...]
Rows = list[list[int]]
"""Per rank, the numbers of its actions in order."""

_MOST_ROWS = 4096  # that are known at once


class Problem(StepGraph):
    """Every compute action of a step, numbered once, with what it needs, takes and keeps, for as
    many orders as are to be played.

    An order has either the B of a stage and a microbatch or its I and W.

    Args:
        costs: of every stage.
        placement: ``placement[stage]`` is the rank that holds the stage.
        microbatches: M.
        caps: per rank, the most it may keep at once.

    Attributes:
        room: per rank, its cap with what rounding may add.
        number: of every action.
        seconds: per action.
        adds: per action, how much more is kept as soon as it starts.
        frees: per action, how much less once it has ended.
        whole: per stage, whether a B can be better than its I and W.
    """

    def __init__(
        self,
        costs: Costs,
        placement: Sequence[int],
        microbatches: int,
        caps: Sequence[float],
    ) -> None:
        self.costs = costs
        self.placement = tuple(placement)
        self.microbatches = microbatches
        self.caps = tuple(caps)
        self.room = [cap * ROUNDING for cap in caps]
        stages = range(len(placement))
        actions = [
            Action(stage, kind, microbatch)
            for stage in stages
            for kind in KINDS
            for microbatch in range(microbatches)
        ]
        self.number = {action: number for number, action in enumerate(actions)}
        super().__init__(
            self.schedule([]),
            ((placement[action.stage], action) for action in actions),
            feeds=None if costs.wiring is None else Feeds(len(placement), costs.wiring),
            transfer=costs.transfer,
            own_needs=False,  # rows have F before I before W
        )
        self.seconds = [costs.seconds(action) for action in actions]
        changes = [costs.memory[action.stage].change(action.kind) for action in actions]
        self.adds = [change.before for change in changes]
        self.frees = [change.after for change in changes]
        self.whole = [self._is_better_whole(stage) for stage in stages]
        self._peaks = PeakMemory(costs.memory)
        self._known: dict[int, tuple[Row, list[int]]] = {}
        """Rows of nothing but computation, by their identity."""

    def _is_better_whole(self, stage: int) -> bool:
        """Whether a B of ``stage`` can be better than its I and W, by keeping less.

        Otherwise an I hands on its gradient earlier, and costs nothing more.
        """
        size = self.costs.memory[stage]
        return not math.isinf(self.caps[self.placement[stage]]) and size.deferred > size.saved

    def play(
        self, schedule: Schedule, journeys: Sequence[Journey] | None = None
    ) -> PlayedOrder | None:
        """How a schedule without mistakes runs, with the times of ``simulate``; None where ranks
        wait for each other. ``journeys`` are those of the schedule, where they are known.
        """
        graph: StepGraph = self
        seconds = self.seconds
        rows: Sequence[Sequence[int]] = [self._known_numbers(row) for row in schedule.ranks]
        if not all(rows):
            graph, seconds = self.copy(), [*seconds]
            rows = [
                known or [self._placed(graph, seconds, rank, action) for action in row]
                for rank, (known, row) in enumerate(zip(rows, schedule.ranks, strict=True))
            ]
            rows = add_lanes(
                graph, schedule, rows, seconds, self.costs.transfer, self.costs.memory, journeys
            ).rows
        run = play(graph, rows, seconds)
        done = run.places == [*map(len, rows)]
        return PlayedOrder(self, schedule, graph, rows, run) if done else None

    def _known_numbers(self, row: Row) -> list[int]:
        """The numbers of a row that is known; none if more is in it than computation."""
        known = self._known.get(id(row))
        if known is None:
            if len(self._known) > _MOST_ROWS:
                self._known.clear()
            numbers = [self.number.get(action, -1) for action in row]
            known = self._known[id(row)] = row, [] if -1 in numbers else numbers
        return known[1]

    def _placed(self, graph: StepGraph, seconds: list[float], rank: int, action: Action) -> int:
        number = self.number.get(action)
        if number is None:
            seconds.append(0.0)
            number = graph.add(rank, action)
        return number

    def over(self, schedule: Schedule, journeys: Sequence[Journey] | None = None) -> float:
        """By how much ranks exceed their caps by order, as a share of these."""
        if all(map(math.isinf, self.caps)):
            return 0.0
        peaks = zip(self._peaks.of(schedule, journeys), self.caps, strict=True)
        return sum(max(0.0, peak / cap - ROUNDING) for peak, cap in peaks if cap > 0)

    def opened(self, schedule: Schedule) -> Schedule:
        """The schedule with each B as its I and W where it is no better whole."""
        rows = (tuple(part for a in row for part in self._parts(a)) for row in schedule.ranks)
        return replace(schedule, ranks=tuple(rows), split_backward=True)

    def _parts(self, action: Action) -> Iterable[Action]:
        if action.kind is not FULL or self.whole[action.stage]:
            return (action,)
        return replace(action, kind=INPUT), replace(action, kind=WEIGHT)

    def schedule(self, rows: Rows) -> Schedule:
        """The schedule that runs ``rows``."""
        return Schedule(
            "auto",
            len(self.placement),
            self.microbatches,
            tuple(tuple(self.actions[number] for number in row) for row in rows),
            self.placement,
            split_backward=True,
        )

    @property
    def least(self) -> float:
        """Seconds that no order undercuts: no rank can begin before the Fs of the stages before it,
        nor end before all its work is done.
        """
        begins: list[float] = []
        for stage in range(len(self.placement)):
            sources = self._feeds.sources(stage)
            begins.append(max((begins[s] + self.costs.times[s][0] for s in sources), default=0.0))
        bounds = []
        for rank in range(len(self.caps)):
            stages = [stage for stage, each in enumerate(self.placement) if each == rank]
            work = sum(sum(self.costs.times[stage]) for stage in stages)
            lead = min((begins[stage] for stage in stages), default=0.0)
            bounds.append(lead + self.microbatches * work)
        return max(bounds)


@dataclass(frozen=True, eq=False)
class PlayedOrder:
    """A schedule, and how it ran.

    Attributes:
        problem: of which this is an order.
        schedule: what was played, or what became of it.
        graph: its actions.
        rows: per rank and lane, the numbers of what it ran.
        run: how.
    """

    problem: Problem
    schedule: Schedule
    graph: StepGraph
    rows: Sequence[Sequence[int]]
    run: Play

    @property
    def makespan(self) -> float:
        """How long it takes."""
        return self.run.makespan

    @cached_property
    def blocks(self) -> list[tuple[int, list[Action]]]:
        """Stretches of the critical path that lie on one rank, from the end of the step on."""
        graph, causes = self.graph, self.run.causes
        places = {
            number: (at, place)
            for at, row in enumerate(self.rows)
            for place, number in enumerate(row)
        }
        at, last = self.run.last, len(self.rows[self.run.last]) - 1
        found = []
        while True:
            row, first = self.rows[at], last
            while first > 0 and causes[row[first]] < 0:
                first -= 1
            if at < len(self.schedule.ranks):
                found.append((at, [graph.actions[number] for number in row[first : last + 1]]))
            parcel = causes[row[first]]
            if parcel < 0:
                return found
            maker = graph.makers[parcel]
            if maker not in places:  # of an I and a B, which make the same
                maker = self.problem.number[replace(graph.actions[maker], kind=FULL)]
            at, last = places[maker]
