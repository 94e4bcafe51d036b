"""The shortest step within a limit of memory, by all measures together.

Where weight gradients go, what is kept at a partner, what in the host's store, what is made again,
and how much the split itself saves: each costs time in another place, so they are chosen on one
simulated step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.memory.measures import balanced, offloaded, recomputed
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.timeline import Timeline
from autosplit.text.figures import few

from .changes import adds_in_order, early
from .local_search import improve
from .problem import Problem, Row, Tally
from .search import caps_of, placed, search

MEASURES: Mapping[str, Callable[[Schedule, Costs, Sequence[float]], Schedule]] = {
    "balance": balanced,
    "offload": offloaded,
    "recompute": recomputed,
}
"""What can be done to a schedule that holds too much, by name."""

_KINDS = {
    "balance": ActionKind.EVICT,
    "offload": ActionKind.OFFLOAD,
    "recompute": ActionKind.RECOMPUTE,
}

_ALONE = 100_000
"""Actions simulated for one setting with one measure; what ``search`` plays is beside that."""

_TOGETHER = 240_000  # with all of them, behind that
_ORDERS = 60_000  # actions that each search for an order without measures plays
_BASES = 3  # schedules without measures that several are tried on, the shortest first
_STARTS = 3  # schedules that other orders are looked for from
_SHORT = 0.6  # of the work with several measures is a look from each start, the rest for the best
_SAME = 1 + 1e-6  # of a step


@dataclass(frozen=True)
class WithinMemory:
    """A schedule within a limit, and how it came to be.

    Attributes:
        schedule: named ``"auto"``.
        timeline: its step.
        peaks: per rank, the most that it holds of its microbatches: by the order of its row, so
            whatever transfers take.
        measures: those that it takes.
        unlimited: seconds of the shortest step that was found without a limit.
        simulated: how many actions the search played to find it.
    """

    schedule: Schedule
    timeline: Timeline
    peaks: tuple[float, ...]
    measures: tuple[str, ...]
    unlimited: float
    simulated: int


class _Kept(NamedTuple):
    """A schedule that was found, by how much it exceeds the limit, and what it was made from."""

    step: float
    schedule: Schedule
    base: str
    excess: float


class LimitError(ScheduleError):
    """Nothing was found within a limit.

    Attributes:
        least: the least limit that something was found for; infinite if nothing was.
        bound: what no schedule can do with less than.
        schedule: what keeps ``least``.
    """

    # Defaults, because an error on its way to another process is made from its message alone.
    def __init__(
        self,
        message: str,
        least: float = math.inf,
        bound: float = 0.0,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(message)
        self.least = least
        self.bound = bound
        self.schedule = schedule


def search_within(
    costs: Costs,
    microbatches: int,
    limit: float | Sequence[float],
    *,
    ranks: int | None = None,
    placement: Sequence[int] | None = None,
    fixed: Sequence[float] = (),
    measures: Sequence[str] = tuple(MEASURES),
) -> WithinMemory:
    """The shortest step that was found in which no rank holds more than a limit; deterministic.

    What a rank holds is counted by the order of its row (``peak_memory``), which the engine keeps
    whatever transfers take. The step is never longer than the shortest that any single measure
    gives on a named schedule or on one that ``search`` finds. How much is simulated is bounded.

    Args:
        costs: of every stage.
        microbatches: M >= 1.
        limit: bytes that a rank may hold: one number, or one for each rank.
        ranks: number of processes; None means one for each stage.
        placement: the rank of every stage, where that is settled.
        fixed: per rank, bytes of parameters, gradients and optimizer state, which count towards
            the limit; none where the limit is of activations only.
        measures: of ``MEASURES``, those that may be taken.

    Raises:
        LimitError: a limit below what is fixed, or one that no measures keep; says the least for
            which something was found, what nothing can do with less than, and what dominates there.
        ScheduleError: an unknown measure, or a bad count.
    """
    unknown = [measure for measure in measures if measure not in MEASURES]
    if unknown:
        raise ScheduleError(f"unknown measure {unknown[0]!r}; known: {few(list(MEASURES), 9)}")
    count = ranks or len(costs.times)
    limits = caps_of(limit, count)
    rests = [*fixed] if fixed else [0.0] * count
    if len(rests) != count:
        raise ScheduleError(f"expected what is fixed on each of {count} ranks, got {len(rests)}")
    caps = [most - rest for most, rest in zip(limits, rests, strict=True)]
    one = _LimitSearch(costs, microbatches, count, placement, caps, measures)
    # Without room on some rank for what every schedule needs there is nothing to look for.
    found = one.run() if max(one.bound) <= 0.0 else None
    if found is None:
        raise _refusal(limits, rests, one.bound, *one.frugal())
    return found


def _refusal(
    limits: Sequence[float],
    rests: Sequence[float],
    over: Sequence[float],
    excess: float,
    what: str,
    schedule: Schedule,
) -> LimitError:
    """What is said of a limit that nothing keeps.

    Args:
        limits: by rank.
        rests: by rank, what is fixed.
        over: by rank, by how much what every schedule holds exceeds the limit.
        excess: by how much what comes nearest to the limit exceeds it.
        what: that is.
        schedule: likewise.
    """
    rank = over.index(max(over))
    bound, rest = limits[rank] + over[rank], rests[rank]
    least = max(limits) + excess
    dominates, advice = "activations", "cut the batch into more and smaller microbatches"
    if rest > bound - rest:
        dominates = "parameters, gradients and optimizer state"
        advice = "use more ranks, or an optimizer that keeps less"
    less = "" if least <= bound * ROUNDING else f" than {bound:,.0f}"
    return LimitError(
        f"no schedule within a limit of {min(limits):,.0f} was found: the least that was needs "
        f"{least:,.0f} ({what}), and none can do with less{less}. Rank {rank} holds {rest:,.0f} of "
        f"parameters, gradients and optimizer state, and at least {bound - rest:,.0f} of one "
        f"microbatch: {dominates} dominate. Use a limit of {math.ceil(least):,}, or {advice}",
        least,
        bound,
        schedule,
    )


@dataclass(frozen=True)
class _CountedCosts(Costs):
    """The same costs, for many plays, which they count."""

    tally: Tally = field(default_factory=Tally, compare=False)

    @classmethod
    def of(cls, costs: Costs) -> _CountedCosts:
        """These costs, nothing played yet."""
        return cls(**{each.name: getattr(costs, each.name) for each in fields(Costs)})

    def timeline(self, schedule: Schedule) -> Timeline:
        """As ``Costs.timeline``."""
        self.tally.actions += sum(map(len, schedule.ranks))
        return super().timeline(schedule)


class _LimitSearch:
    """One setting's search.

    Attributes:
        bound: per rank, by how much what every schedule holds exceeds the limit.
        unlimited: seconds of the shortest step without a limit.
    """

    def __init__(
        self,
        costs: Costs,
        microbatches: int,
        ranks: int,
        placement: Sequence[int] | None,
        caps: Sequence[float],
        measures: Sequence[str],
    ) -> None:
        # What is reduced behind a step, every order leaves to the end.
        self._costs = _CountedCosts.of(replace(costs, reductions=None))
        self._caps = caps
        self._measures = measures
        self._kept: dict[Sequence[str], list[_Kept]] = {}
        """By the measures that were tried, those that keep the limit."""
        self._nearest: _Kept | None = None
        self._made: dict[tuple[str, tuple[Row, ...]], Schedule] = {}
        self._bases = self._found(microbatches, ranks, placement)
        self._problems = {
            place: Problem(self._costs, place, microbatches, caps, self._costs.tally)
            for place in {base.placement for _, base in self._bases}
        }
        self.bound = self._bound(ranks)
        self.unlimited = self._bases[0][0]

    @property
    def simulated(self) -> int:
        """Actions played so far."""
        return self._costs.tally.actions

    def _bound(self, ranks: int) -> list[float]:
        """A rank must hold what one microbatch holds on any of its stages; of all placements the
        one that exceeds the limit least counts.
        """
        found = []
        for place in self._problems:
            least = [0.0] * ranks
            for stage, rank in enumerate(place):
                least[rank] = max(least[rank], self._costs.memory[stage].least)
            found.append([a - cap * ROUNDING for a, cap in zip(least, self._caps, strict=True)])
        return min(found, key=max)

    def _found(
        self, microbatches: int, ranks: int, placement: Sequence[int] | None
    ) -> list[tuple[float, Schedule]]:
        """Schedules without measures and their steps, the shortest first; the best within the limit
        among them.
        """
        costs = self._costs
        named = placed(costs, microbatches, ranks, placement)
        for cap in (math.inf, [max(cap, 1.0) for cap in self._caps]):
            with contextlib.suppress(ScheduleError):
                named.append(
                    search(
                        costs, microbatches, ranks=ranks, placement=placement, cap=cap, work=_ORDERS
                    )
                )
        in_order = [each for each in named if adds_in_order(each)] or named
        # Whether steps overlap is not for a row to say.
        plain = {each.ranks: replace(each, crosses_step=False) for each in in_order}.values()
        return sorted(((self._step(each), each) for each in plain), key=lambda each: each[0])

    def _step(self, schedule: Schedule) -> float:
        return self._costs.timeline(schedule).step_time

    def run(self) -> WithinMemory | None:
        """The best; None if nothing keeps the limit.

        What one measure alone gives is what it gives where no other may be taken.
        """
        for measure in self._measures:
            self._within((measure,), _ALONE)
        if len(self._measures) != 1 and not self._is_least():
            self._within(tuple(self._measures), _TOGETHER)
        fitting = self._fitting()
        if not fitting:
            return None
        schedule = fitting[0].schedule
        return WithinMemory(
            replace(schedule, name="auto"),
            self._costs.timeline(schedule),
            tuple(peak_memory(schedule, self._costs.memory)),
            _taken(schedule),
            self.unlimited,
            self.simulated,
        )

    def _within(self, measures: tuple[str, ...], work: int) -> None:
        """Look for the best with some measures, in so many actions."""
        begun, found = self.simulated, self._kept.setdefault(measures, [])
        for place, (step, base) in enumerate(self._bases):
            shortest = min(map(_step, found), default=math.inf)
            # All that are to come are longer, whatever is done to them.
            if step >= shortest or self._keep(base, base.name, found):
                break
            for made in self._measured(base, measures):
                if place >= _BASES and len(measures) > 1:
                    break
                self._keep(made, base.name, found)
                if self.simulated > begun + work // 2:
                    break
        self._rearranged(measures, found, begun + work)

    def _measured(self, base: Schedule, measures: tuple[str, ...]) -> Iterator[Schedule]:
        """A base with one measure; of several, with each for what another leaves too much.

        A partner takes only what is not sent to the host or run again: it comes first.
        """
        for first in measures:
            key = first, base.ranks
            if key not in self._made:
                self._made[key] = MEASURES[first](base, self._costs, self._caps)
            made = self._made[key]
            if len(measures) == 1:
                yield made
            for second in measures:
                if second not in (first, "balance"):
                    yield MEASURES[second](made, self._costs, self._caps)

    def frugal(self) -> tuple[float, str, Schedule]:
        """What comes nearest to the limit: by how much it exceeds it, what it is, and itself."""
        if self._nearest is None or self._nearest.excess > max(self.bound):
            least = [max(cap + over, 1.0) for cap, over in zip(self._caps, self.bound, strict=True)]
            for _, base in self._bases:
                self._keep(base, base.name, [])
            _, base = min(self._bases, key=lambda each: self._excess(each[1]))
            for measure in self._measures:
                self._keep(MEASURES[measure](base, self._costs, least), base.name, [])
        if self._nearest is None:  # cannot be: there is a base
            raise ScheduleError("no schedule admits the counts")
        _, schedule, base_name, excess = self._nearest
        taken = " and ".join(_taken(schedule)) or "no measure"
        return excess, f"{base_name} with {taken}", schedule

    def _rearranged(self, measures: tuple[str, ...], found: list[_Kept], most: int) -> None:
        """What the best become with other orders, and what shorter ones without measures do."""
        together = len(measures) > 1
        known = self._fitting() if together else sorted(found, key=_step)
        first = self._bases[0][1]
        if self._is_least(known):
            return
        starts = [*{fits.schedule.ranks: fits.schedule for fits in known}.values()]
        if not starts and self._nearest is not None:
            starts.append(self._nearest.schedule)
        starts = [*starts[: _STARTS - 1], first]
        problem = self._problems[first.placement]
        played = problem.play(first) if together else None
        if played is not None:
            starts.append(early(measures, played))
        whole = max(0, most - self.simulated)
        end = self.simulated + int(whole * (_SHORT if together else 1.0))
        for place, start in enumerate(starts):
            share = max(0, end - self.simulated) // (len(starts) - place)
            self._walked(start, share, measures, found)
        if together and found:
            best = min(found, key=_step).schedule
            self._walked(best, max(0, most - self.simulated), measures, found)

    def _fitting(self) -> list[_Kept]:
        """All that keep the limit, the shortest first."""
        return sorted((each for found in self._kept.values() for each in found), key=_step)

    def _is_least(self, known: Sequence[_Kept] | None = None) -> bool:
        """Whether something is as short as without a limit."""
        fitting = self._fitting() if known is None else known
        return bool(fitting) and fitting[0].step <= self._bases[0][0] * _SAME

    def _walked(
        self, start: Schedule, work: int, measures: tuple[str, ...], found: list[_Kept]
    ) -> None:
        """Keep what a start becomes in so many actions."""
        problem = self._problems[start.placement]
        better = improve(start, problem, work, measures, least=self._bases[0][0])
        if better is not None:
            self._keep(better.schedule, start.name, found)

    def _excess(self, schedule: Schedule) -> float:
        """By how much a rank exceeds the limit."""
        peaks = peak_memory(schedule, self._costs.memory)
        return max(peak - cap * ROUNDING for peak, cap in zip(peaks, self._caps, strict=True))

    def _keep(self, schedule: Schedule, base: str, found: list[_Kept]) -> bool:
        """Note a schedule; whether it keeps the limit."""
        excess = self._excess(schedule)
        fits = excess <= 0.0
        kept = _Kept(self._step(schedule) if fits else math.inf, schedule, base, excess)
        if self._nearest is None or excess < self._nearest.excess:
            self._nearest = kept
        if fits:
            found.append(kept)
        return fits


def _step(kept: _Kept) -> float:
    return kept.step


def _taken(schedule: Schedule) -> tuple[str, ...]:
    """The measures that a schedule takes."""
    kinds = {action.kind for row in schedule.ranks for action in row}
    return tuple(name for name, kind in _KINDS.items() if kind in kinds)
