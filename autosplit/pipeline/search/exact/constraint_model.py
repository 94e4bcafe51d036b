"""A step as a constraint model: no overlap on a rank, precedence, messages, memory under the cap.

Microbatches cost all the same, so of any schedule's Fs on a stage the j-th may be called
microbatch j, and likewise its Is and its Ws, without changing when anything runs or what is kept.
It is therefore enough to look at schedules that take each kind in order. Only where a stage may
run Bs are the Ws free, for a B is tied to its own. A B is an I of its own length with an empty W.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.search.bound import lower_bound
from autosplit.pipeline.search.problem import FORWARD, FULL, INPUT, KINDS, WEIGHT, Problem, Rows

from .units import Units

_FINEST_MEMORY = 10**9  # bytes are whole numbers


class _Sending(NamedTuple):
    """What goes over a link: who makes it, for how long it keeps the link, and when it has gone."""

    maker: int
    takes: int
    gone: Any


class StepModel:
    """The constraint model of a problem, for OR-tools' CP-SAT.

    Args:
        solver: the module ``ortools.sat.python.cp_model``.
        problem: the step.
        hint: an order that fits, from which the solver begins and which it need not exceed.
        beside: further seconds that are to be exact where they can be.

    Attributes:
        finest: units of time that what takes longest may have.
        shortest: units that anything takes at least.
    """

    finest = 1_000_000
    shortest = 0

    def __init__(
        self, solver: Any, problem: Problem, hint: Rows | None, beside: Iterable[float] = ()
    ) -> None:
        self.problem = problem
        self.model = solver.CpModel()
        travels = [each for made in problem.makes for _, _, *travel in made for each in travel]
        self.units = Units([*problem.seconds, *travels, *beside], self.finest)
        self._took = [max(self.shortest, self.units.nearest(each)) for each in problem.seconds]
        played = None if hint is None else problem.play(hint)
        self._horizon = sum(self._took) + sum(map(self.units.nearest, travels))
        if played is not None:
            self._horizon = self.units.above(played.makespan + self.units.slack(self._took))
        self._numbers = [n for n, action in enumerate(problem.actions) if action.kind is not FULL]
        self._starts = {number: self._moment() for number in self._numbers}
        self._ends = {number: self._moment() for number in self._numbers}
        self._fused = {
            number: self.model.new_bool_var("")
            for number in self._numbers
            if problem.actions[number].kind is INPUT
            and problem.whole[problem.actions[number].stage]
        }
        self._add_orders()
        self._add_ranks()
        self._add_messages()
        for rank in range(len(problem.caps)):
            self._add_memory(rank)
        self._add_makespan()
        if hint is not None and played is not None:
            self._add_hint(hint, played.starts)

    def rows(self, value: Any) -> list[list[Action]]:
        """Per rank, its actions in the order of a solution; ``value`` gives a variable's."""
        rows: list[list[tuple[tuple[int, ...], Action]]] = [[] for _ in self.problem.caps]
        whole = {number for number, chosen in self._fused.items() if value(chosen)}
        for number in self._numbers:
            action = self.problem.actions[number]
            if action.kind is WEIGHT and self.problem.part(number, INPUT) in whole:
                continue
            start, end = value(self._starts[number]), value(self._ends[number])
            # Of what takes no time, that of earlier microbatches first: it lets go of memory.
            place = start, end > start, action.microbatch, KINDS.index(action.kind)
            if number in whole:
                action = Action(action.stage, FULL, action.microbatch)
            rows[self.problem.ranks[number]].append((place, action))
        return [[action for _, action in sorted(row, key=lambda each: each[0])] for row in rows]

    def _moment(self) -> Any:
        return self.model.new_int_var(0, self._horizon, "")

    def _lasts(self, number: int) -> Any:
        """How long an action takes: a number, or that of its B where it may be part of one."""
        problem, kind = self.problem, self.problem.actions[number].kind
        chosen = self._fused.get(problem.part(number, INPUT))
        if chosen is None or kind is FORWARD:
            return self._took[number]
        whole = self._took[problem.part(number, FULL)] if kind is INPUT else 0
        return self._took[number] + chosen * (whole - self._took[number])

    def _add_orders(self) -> None:
        """Each kind of a stage in order, F before I before W, and a B in one piece."""
        count = self.problem.microbatches
        for number in self._numbers:
            action = self.problem.actions[number]
            free = action.kind is WEIGHT and self.problem.whole[action.stage]
            if action.microbatch + 1 < count and not free:
                self.model.add(self._starts[number + 1] >= self._ends[number])
            if action.kind is not FORWARD:
                self.model.add(self._starts[number] >= self._ends[number - count])
        for number, chosen in self._fused.items():
            together = self._starts[number + count] == self._ends[number]
            self.model.add(together).only_enforce_if(chosen)

    def _add_ranks(self) -> None:
        spans = defaultdict(list)
        for number in self._numbers:
            start, end = self._starts[number], self._ends[number]
            span = self.model.new_interval_var(start, self._lasts(number), end, "")
            spans[self.problem.ranks[number]].append(span)
        for row in spans.values():
            self.model.add_no_overlap(row)

    def _add_messages(self) -> None:
        """A message goes once it is made and those made before it on its link have gone."""
        problem = self.problem
        arrivals: list[Any] = [None] * len(problem.makers)
        links: dict[tuple[int, int], list[_Sending]] = defaultdict(list)
        for number in self._numbers:
            for parcel, link, took, latency in problem.makes[number]:
                arrivals[parcel] = gone = self._ends[number]
                if link is None:
                    continue
                takes = self.units.nearest(took)
                if takes:
                    gone = self._moment()
                    self.model.add(gone >= self._ends[number] + takes)
                    links[link].append(_Sending(number, takes, gone))
                arrivals[parcel] = gone + self.units.nearest(latency)
        for number in self._numbers:
            for parcel in problem.needs[number]:
                self.model.add(self._starts[number] >= arrivals[parcel])
        for messages in links.values():
            for one, other in combinations(messages, 2):
                self._add_turns(one, other)

    def _add_turns(self, one: _Sending, other: _Sending) -> None:
        """Of two messages on one link, that made first goes first; of one result, in order."""
        if one.maker == other.maker:
            self.model.add(other.gone >= one.gone + other.takes)
            return
        first = self.model.new_bool_var("")
        for early, late, case in ((one, other, first), (other, one, ~first)):
            earlier = self._ends[early.maker] <= self._ends[late.maker]
            self.model.add(earlier).only_enforce_if(case)
            self.model.add(late.gone >= early.gone + late.takes).only_enforce_if(case)

    def _add_memory(self, rank: int) -> None:
        """What is kept from F to W, and what more from F to I or from I to W."""
        problem, cap = self.problem, self.problem.caps[rank]
        if math.isinf(cap):
            return
        sizes, count = problem.costs.memory, problem.microbatches
        numbers = (each for size in sizes for each in (size.saved, size.deferred))
        units = Units(numbers, finest=_FINEST_MEMORY)
        spans, kept = [], []
        for forward in self._numbers:
            action = problem.actions[forward]
            if action.kind is not FORWARD or problem.ranks[forward] != rank:
                continue
            inputs, weight = forward + count, forward + 2 * count
            saved, deferred = map(
                units.above, (sizes[action.stage].saved, sizes[action.stage].deferred)
            )
            spans.append(self._span(self._starts[forward], self._ends[weight]))
            kept.append(min(saved, deferred))
            if saved > deferred:
                spans.append(self._span(self._starts[forward], self._ends[inputs]))
                kept.append(saved - deferred)
            elif deferred > saved:
                apart = ~self._fused[inputs]
                spans.append(self._span(self._starts[inputs], self._ends[weight], apart))
                kept.append(deferred - saved)
        room = units.below(cap)
        self.model.add_cumulative(spans, kept, room)
        self._add_room(rank, units, room)

    def _span(self, start: Any, end: Any, present: Any = True) -> Any:
        return self.model.new_optional_interval_var(start, self._moment(), end, present, "")

    def _add_room(self, rank: int, units: Units, room: int) -> None:
        """What follows from the cap for one stage alone: so many Fs later a W must be done.

        The solver would find that out as well, but much later.
        """
        problem, count = self.problem, self.problem.microbatches
        for stage, home in enumerate(problem.placement):
            size = problem.costs.memory[stage]
            least = units.above(min(size.saved, size.deferred))
            if home != rank or problem.whole[stage] or not least:
                continue
            first = problem.number[Action(stage, FORWARD, 0)]
            for earlier, later in zip(range(count), range(room // least, count), strict=False):
                done = self._ends[first + 2 * count + earlier]
                self.model.add(self._starts[first + later] >= done)

    def _add_makespan(self) -> None:
        makespan = self._moment()
        for end in self._ends.values():
            self.model.add(makespan >= end)
        least = lower_bound(self.problem) - self.units.slack(self._took)
        self.model.add(makespan >= self.units.below(max(least, 0.0)))
        self.model.minimize(makespan)

    def _add_hint(self, rows: Rows, starts: Sequence[float]) -> None:
        """Begin from an order; it may take microbatches in another order, which is no harm."""
        for number in (number for row in rows for number in row):
            start = self.units.nearest(starts[number])
            if self.problem.actions[number].kind is FULL:
                inputs = self.problem.part(number, INPUT)
                self.model.add_hint(self._starts[inputs], start)
                self.model.add_hint(self._fused[inputs], True)
            else:
                self.model.add_hint(self._starts[number], start)
                if number in self._fused:
                    self.model.add_hint(self._fused[number], False)
