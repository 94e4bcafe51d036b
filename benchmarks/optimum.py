"""The shortest step there is, one stage a rank, by OR-tools' CP-SAT: what searches are judged by.

A job shop with memory: https://developers.google.com/optimization/cp. Microbatches cost all the
same, so it is enough to look at schedules that take each kind of action in their order; only where
a stage may run Bs are its Ws free, for a B is tied to its own. A B is an I with its W directly
behind it, of which no more is kept than what F saved.

What a microbatch holds may be away at the partner or in the host's store, whole, or be made again.
Of moves the model has less than the engine keeps to: a transfer may begin at any moment and takes
nothing of its rank, and what is held is counted in time. So no step of the engine's is shorter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from autosplit.pipeline import Costs

_WORKERS = 8  # strategies that take turns


class Optimum(NamedTuple):
    """Seconds of the best step that was found or known before, and what none takes less than."""

    step: float
    bound: float


def optimum(
    costs: Costs,
    microbatches: int,
    limit: float,
    *,
    measures: Sequence[str] = (),
    known: float = math.inf,
    seconds: float = 60.0,
) -> Optimum:
    """The shortest step of small cases, whose costs are short decimals.

    Args:
        costs: of one stage a rank, each feeding the next, with B as long as I and W.
        microbatches: M.
        limit: the most that a rank may hold of its microbatches.
        measures: of ``"balance"``, ``"offload"`` and ``"recompute"``, those that may be taken.
        known: a step that there is; infinite where none is known.
        seconds: how long to search.
    """
    step = _Step(costs, microbatches, limit, measures, known)
    engine = cp_model.CpSolver()
    engine.parameters.max_time_in_seconds = seconds
    # The same answer every time, unless the time runs out.
    engine.parameters.interleave_search = True
    engine.parameters.num_workers = _WORKERS
    status = engine.solve(step.model)
    if status == cp_model.INFEASIBLE:
        return Optimum(math.inf, math.inf)
    bound = max(0.0, engine.best_objective_bound) / step.units
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Optimum(known, bound)
    return Optimum(engine.objective_value / step.units, bound)


class _Step:
    """The model of a step.

    Attributes:
        model: the constraints, and the step to make short.
        units: of time, in a second.
    """

    def __init__(
        self,
        costs: Costs,
        microbatches: int,
        limit: float,
        measures: Sequence[str],
        known: float,
    ) -> None:
        self._costs, self._measures, self._ranks = costs, measures, len(costs.times)
        travels = [*self._travels()]
        self.units = _units([seconds for times in costs.times for seconds in times] + travels)
        longest = microbatches * (sum(map(sum, costs.times)) + sum(travels))
        self._horizon = math.ceil(min(known, longest) * self.units)
        self.model: Any = cp_model.CpModel()
        self._busy: dict[int, list[Any]] = defaultdict(list)
        self._lanes: dict[tuple[int, object], list[Any]] = defaultdict(list)
        self._kept: dict[int, list[tuple[Any, float]]] = defaultdict(list)
        forwards, inputs, ends = self._computed(microbatches)
        self._add_messages(forwards, inputs)
        for row in (*self._busy.values(), *self._lanes.values()):
            self.model.add_no_overlap(row)
        self._add_limit(limit)
        step = self._moment()
        self.model.add_max_equality(step, ends)
        self.model.minimize(step)

    def _travels(self) -> Iterator[float]:
        """Seconds of everything that may be on its way."""
        links = self._costs.transfer
        yield from (links.latency, self._message())
        for rank, size in enumerate(self._costs.memory):
            for link in (links.link(rank, self._partner(rank)), links.host):
                if link is not None:
                    yield link.latency
                    yield from (each / link.bandwidth for each in (size.saved, size.deferred))

    def _message(self) -> float:
        """Seconds for which a message keeps its link."""
        size = self._costs.transfer.message_bytes
        if not isinstance(size, (int, float)):
            raise TypeError(f"expected messages of one size, got {size!r}")
        return size / self._costs.transfer.bandwidth

    def _partner(self, rank: int) -> int:
        return self._ranks - 1 - rank

    def _whole(self, seconds: float) -> int:
        return round(seconds * self.units)

    def _moment(self) -> Any:
        return self.model.new_int_var(0, self._horizon, "")

    def _computed(
        self, microbatches: int
    ) -> tuple[list[list[tuple[Any, Any]]], list[list[tuple[Any, Any]]], list[Any]]:
        """By stage, when each F and I starts, and its result is there; and when each W ends."""
        forwards: list[list[tuple[Any, Any]]] = [[] for _ in range(self._ranks)]
        inputs: list[list[tuple[Any, Any]]] = [[] for _ in range(self._ranks)]
        ends = []
        for stage, size in enumerate(self._costs.memory):
            weights = []
            for _ in range(microbatches):
                forward, backward, weight = (
                    self._run(stage, self._whole(each)) for each in self._costs.times[stage]
                )
                self.model.add(backward[0] >= forward[1])
                self.model.add(weight[0] >= backward[1])
                sent = self._hold(stage, forward, backward, weight)
                forwards[stage].append(forward)
                inputs[stage].append((backward[0], sent))
                weights.append(weight)
            free = size.deferred > size.saved
            for row in (forwards[stage], inputs[stage], *([] if free else [weights])):
                for one, other in pairwise(row):
                    self.model.add(other[0] >= one[1])
            ends += [end for _, end in weights]
        return forwards, inputs, ends

    def _run(self, stage: int, took: int, present: Any = True) -> tuple[Any, Any]:
        start, end = self._moment(), self._moment()
        span = self.model.new_optional_interval_var(start, took, end, present, "")
        self._busy[stage].append(span)
        return start, end

    def _add_messages(
        self, forwards: Sequence[list[tuple[Any, Any]]], inputs: Sequence[list[tuple[Any, Any]]]
    ) -> None:
        """A link carries one message after the other, in the order in which they are made."""
        took, latency = map(self._whole, (self._message(), self._costs.transfer.latency))
        pairs = [*pairwise(forwards), *pairwise(reversed(inputs))]
        for makers, takers in pairs:
            gone: Any = 0
            for (_, made), (taken, _) in zip(makers, takers, strict=True):
                arrives = made + took
                if took:
                    before, gone = gone, self._moment()
                    self.model.add(gone >= arrives)
                    self.model.add(gone >= before + took)
                    arrives = gone
                self.model.add(taken >= arrives + latency)

    def _hold(self, rank: int, forward: Any, inputs: Any, weight: Any) -> Any:
        """What a microbatch holds, from its F to its W; when its gradient can be sent on."""
        size, sent, apart = self._costs.memory[rank], inputs[1], True
        if size.deferred > size.saved:  # a B holds less, and otherwise is of no use
            whole, sent = self.model.new_bool_var(""), self._moment()
            apart = ~whole
            self.model.add(sent >= inputs[1])
            self.model.add(sent >= weight[1]).only_enforce_if(whole)
            self.model.add(weight[0] == inputs[1]).only_enforce_if(whole)
            self._keep(rank, inputs[0], weight[1], size.saved, whole)
        self._wait(rank, forward, inputs[0], size.saved, True, saved=True)
        self._keep(rank, inputs[0], inputs[1], max(size.saved, size.deferred), apart)
        self._wait(rank, (inputs[1], inputs[1]), weight[0], size.deferred, apart, saved=False)
        self._keep(rank, weight[0], weight[1], size.deferred, apart)
        return sent

    def _wait(
        self, rank: int, maker: Any, used: Any, size: float, present: Any, *, saved: bool
    ) -> None:
        """What is held between two actions: here, away, or made again."""
        start, made = maker
        choices = [self.model.new_bool_var("")]
        self._keep(rank, start, used, size, choices[0])
        partner, links = self._partner(rank), self._costs.transfer
        if "balance" in self._measures and partner != rank:
            lanes = (rank, partner), (partner, rank)
            choices.append(
                self._away(rank, maker, used, size, links.link(rank, partner), lanes, partner)
            )
        if "offload" in self._measures and links.host is not None:
            lanes = (rank, "out"), (rank, "in")  # type: ignore[assignment]
            choices.append(self._away(rank, maker, used, size, links.host, lanes, None))
        if "recompute" in self._measures and saved:
            chosen = self.model.new_bool_var("")
            begin, end = self._run(rank, self._whole(self._costs.times[rank][0]), chosen)
            self.model.add(begin >= made).only_enforce_if(chosen)
            self.model.add(end <= used).only_enforce_if(chosen)
            self._keep(rank, start, made, size, chosen)
            self._keep(rank, made, begin, self._costs.memory[rank].inputs, chosen)
            self._keep(rank, begin, used, size, chosen)
            choices.append(chosen)
        self.model.add(sum(choices) == present)

    def _away(
        self,
        rank: int,
        maker: Any,
        used: Any,
        size: float,
        link: Any,
        lanes: Sequence[tuple[int, object]],
        holder: int | None,
    ) -> Any:
        """Whether it is away between two actions, in the host's store or on another rank."""
        chosen = self.model.new_bool_var("")
        took, latency = self._whole(size / link.bandwidth), self._whole(link.latency)
        left, gone, comes, back = (self._moment() for _ in range(4))
        for lane, begin, end in ((lanes[0], left, gone), (lanes[1], comes, back)):
            span = self.model.new_optional_interval_var(begin, took, end, chosen, "")
            self._lanes[lane].append(span)
        for early, late in ((maker[1], left), (gone + latency, comes), (back + latency, used)):
            self.model.add(early <= late).only_enforce_if(chosen)
        self._keep(rank, maker[0], gone, size, chosen)
        self._keep(rank, comes, used, size, chosen)
        if holder is not None:
            self._keep(holder, left, back, size, chosen)
        return chosen

    def _keep(self, rank: int, start: Any, end: Any, size: float, present: Any) -> None:
        span = self.model.new_optional_interval_var(start, self._moment(), end, present, "")
        self._kept[rank].append((span, size))

    def _add_limit(self, limit: float) -> None:
        if math.isinf(limit):
            return
        for kept in self._kept.values():
            sizes = [size for _, size in kept]
            units = _units([*sizes, limit])
            room = math.floor(limit * units + 1e-6)
            spans = [span for span, _ in kept]
            self.model.add_cumulative(spans, [round(each * units) for each in sizes], room)


def _units(numbers: Iterable[float]) -> int:
    """Of a grid on which all of these are whole."""
    return math.lcm(*(Fraction(f"{number:.9g}").denominator for number in numbers))
