"""The shortest step within a limit of memory, by all measures together.

Where weight gradients go, what is kept at a partner, what in the host's store, what is made again,
and how much the split itself saves: each costs time in another place, so they are chosen on one
simulated step.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.memory import balance, measures
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.timeline import Timeline
from autosplit.text.figures import few

from .changes import adds_in_order, early, without
from .local_search import improve
from .problem import Problem, Tally
from .search import caps_of, placed, search

MEASURES: Mapping[str, Callable[[Schedule, Costs, Sequence[float]], Schedule]] = {
    "balance": balance.nearest,
    "offload": measures.offloaded,
    "recompute": measures.recomputed,
}
"""What can be done to a schedule that holds too much, by name."""

_ALONE = 100_000
"""Actions simulated for one setting with one measure; what ``search`` plays is beside that."""

_TOGETHER = 240_000  # with all of them, behind that
_ORDERS = 60_000  # actions that each search for an order without measures plays
_BASES = 3  # schedules without measures that several are tried on, the shortest first
_STARTS = 3  # schedules that other orders are looked for from
_SHORT = 0.6  # of the work with several measures is a look from each start, the rest for the best
_SAME = 1 + 1e-6  # of a step


@dataclass(frozen=True)
class MeasureEffect:
    """What one measure does beside the others: seconds that the step is longer than without it, and
    by how much each rank's peak is less.
    """

    measure: str
    seconds: float
    saved: tuple[float, ...]


@dataclass(frozen=True)
class WithinMemory:
    """A schedule within a limit, and how it came to be.

    Attributes:
        schedule: named ``"auto"``.
        timeline: its step.
        peaks: per rank, the most that it holds of its microbatches: by the order of its row, so
            whatever transfers take.
        base: the schedule that the measures were taken on.
        effects: per measure, what it did.
        setting: the memory setting of the split that it is for.
        unlimited: seconds of the shortest step that was found without a limit.
        simulated: how many actions the search played to find it.
    """

    schedule: Schedule
    timeline: Timeline
    peaks: tuple[float, ...]
    base: str
    effects: tuple[MeasureEffect, ...]
    setting: str | int = "saved"
    unlimited: float = math.inf
    simulated: int = 0


class _Fitting(NamedTuple):
    """A schedule that keeps the limit, and what it was made from."""

    step: float
    schedule: Schedule
    base: str


@dataclass
class _Found:
    """What was found with some measures.

    Attributes:
        fitting: by base, the shortest step that keeps the limit.
        nearest: by how much what comes nearest to the limit exceeds it, of which base, and itself.
    """

    fitting: dict[str, _Fitting] = field(default_factory=dict)
    nearest: tuple[float, str, Schedule] | None = None

    @property
    def shortest(self) -> float:
        """Seconds; infinite where nothing keeps the limit."""
        return min((each.step for each in self.fitting.values()), default=math.inf)


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
    costs: Costs | Mapping[str | int, Costs],
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
        costs: of every stage; or by memory setting of the split, of which the best is taken.
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
    settings = {"saved": costs} if isinstance(costs, Costs) else dict(costs)
    count = ranks or len(next(iter(settings.values())).times)
    limits = caps_of(limit, count)
    rests = [*fixed] if fixed else [0.0] * count
    if len(rests) != count:
        raise ScheduleError(f"expected what is fixed on each of {count} ranks, got {len(rests)}")
    caps = [most - rest for most, rest in zip(limits, rests, strict=True)]
    found: list[WithinMemory] = []
    nearest: list[tuple[float, str, Schedule]] = []
    unlimited, simulated, bounds = math.inf, 0, []
    for setting, each in settings.items():
        one = _LimitSearch(each, microbatches, count, placement, caps, measures)
        bounds.append(one.bound)
        if max(one.bound) <= 0.0:  # no rank but has room for what every schedule needs
            unlimited = min(unlimited, one.unlimited)
            best = one.run()
            found += [] if best is None else [replace(best, setting=setting)]
        nearest.append(one.frugal())
        simulated += one.simulated
    if not found:
        raise _refusal(limits, rests, bounds, nearest)
    best = min(found, key=lambda each: each.timeline.step_time)
    return replace(best, unlimited=unlimited, simulated=simulated)


def _refusal(
    limits: Sequence[float],
    rests: Sequence[float],
    bounds: Sequence[Sequence[float]],
    nearest: Sequence[tuple[float, str, Schedule]],
) -> LimitError:
    """What is said of a limit that nothing keeps.

    Args:
        limits: by rank.
        rests: by rank, what is fixed.
        bounds: by setting and rank, by how much what every schedule holds exceeds the limit.
        nearest: by setting, by how much what comes nearest to the limit exceeds it.
    """
    over = min(bounds, key=max)
    rank = over.index(max(over))
    bound, rest = limits[rank] + over[rank], rests[rank]
    excess, what, schedule = min(nearest, key=lambda each: each[0])
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
    """The same costs, for many plays, which they count; peaks are those by order."""

    tally: Tally = field(default_factory=Tally, compare=False)

    @classmethod
    def of(cls, costs: Costs) -> _CountedCosts:
        """These costs, nothing played yet."""
        return cls(**{each.name: getattr(costs, each.name) for each in fields(Costs)})

    def timeline(self, schedule: Schedule) -> Timeline:
        """As ``Costs.timeline``."""
        self.tally.actions += sum(map(len, schedule.ranks))
        return super().timeline(schedule)

    def peaks(self, schedule: Schedule, timeline: Timeline) -> list[float]:
        """Per rank, the most that it keeps by the order of its row, whatever transfers take."""
        return peak_memory(schedule, self.memory)


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
        self._found_by: dict[tuple[str, ...], _Found] = defaultdict(_Found)
        """By the measures that were tried."""
        self._made: dict[tuple[int, str], Schedule] = {}
        """By the place of a base and a measure, what that makes of it."""
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
        if len(self._measures) != 1 and not self._is_least(self._found_by.values()):
            self._within(tuple(self._measures), _TOGETHER)
        fitting = [each for found in self._found_by.values() for each in found.fitting.values()]
        if not fitting:
            return None
        _, schedule, base = min(fitting, key=lambda each: each.step)
        timeline = self._costs.timeline(schedule)
        peaks = tuple(peak_memory(schedule, self._costs.memory))
        effects = tuple(self._effects(schedule, timeline.step_time, peaks))
        return WithinMemory(replace(schedule, name="auto"), timeline, peaks, base, effects)

    def _within(self, measures: tuple[str, ...], work: int) -> None:
        """Look for the best with some measures, in so many actions."""
        begun, found = self.simulated, self._found_by[measures]
        for place, (step, base) in enumerate(self._bases):
            if step >= found.shortest:
                break
            if not self._keep(base, base, found) and (place < _BASES or len(measures) == 1):
                for made in self._measured(place, measures):
                    self._keep(made, base, found)
                    if self.simulated > begun + work // 2:
                        break
        self._rearranged(measures, found, begun + work)

    def _measured(self, place: int, measures: tuple[str, ...]) -> Iterator[Schedule]:
        """A base with one measure; of several, with each for what another leaves too much.

        A partner takes only what is not sent to the host or run again: it comes first.
        """
        for first in measures:
            if (place, first) not in self._made:
                base = self._bases[place][1]
                self._made[place, first] = MEASURES[first](base, self._costs, self._caps)
            made = self._made[place, first]
            if len(measures) == 1:
                yield made
            for second in measures:
                if second not in (first, "balance"):
                    yield MEASURES[second](made, self._costs, self._caps)

    def frugal(self) -> tuple[float, str, Schedule]:
        """What comes nearest to the limit: by how much it exceeds it, what it is, and itself."""
        found = self._found_by[()]
        if self._nearest()[0] > max(self.bound):
            least = [max(cap + over, 1.0) for cap, over in zip(self._caps, self.bound, strict=True)]
            for _, base in self._bases:
                self._keep(base, base, found)
            _, base = min(self._bases, key=lambda each: self._excess(each[1]))
            for measure in self._measures:
                self._keep(MEASURES[measure](base, self._costs, least), base, found)
        excess, base_name, schedule = self._nearest()
        taken = " and ".join(name for name in MEASURES if without(schedule, name) != schedule)
        return excess, f"{base_name} with {taken or 'no measure'}", schedule

    def _nearest(self) -> tuple[float, str, Schedule]:
        every = [found.nearest for found in self._found_by.values() if found.nearest is not None]
        return min(every, key=lambda each: each[0], default=(math.inf, "", self._bases[0][1]))

    def _effects(
        self, schedule: Schedule, step: float, peaks: Sequence[float]
    ) -> Iterator[MeasureEffect]:
        """Of each measure that is taken, what the step would be, and ranks hold, without it."""
        for measure in MEASURES:
            less = without(schedule, measure)
            if less != schedule:
                more = zip(peak_memory(less, self._costs.memory), peaks, strict=True)
                saved = tuple(max(0.0, a - b) for a, b in more)
                yield MeasureEffect(measure, max(0.0, step - self._step(less)), saved)

    def _rearranged(self, measures: tuple[str, ...], found: _Found, most: int) -> None:
        """What the best become with other orders, and what shorter ones without measures do."""
        together = len(measures) > 1
        known = [*self._found_by.values()] if together else [found]
        first = self._bases[0][1]
        if self._is_least(known):
            return
        fitting = sorted(
            (fits for each in known for fits in each.fitting.values()), key=lambda each: each.step
        )
        starts = [*{fits.schedule.ranks: fits.schedule for fits in fitting}.values()]
        if not starts and found.nearest is not None:
            starts.append(found.nearest[2])
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
        if together and found.fitting:
            best = min(found.fitting.values(), key=lambda each: each.step).schedule
            self._walked(best, max(0, most - self.simulated), measures, found)

    def _is_least(self, known: Iterable[_Found]) -> bool:
        """Whether something is as short as without a limit."""
        return any(each.shortest <= self._bases[0][0] * _SAME for each in known)

    def _walked(self, start: Schedule, work: int, measures: tuple[str, ...], found: _Found) -> None:
        """Keep what a start becomes in so many actions."""
        problem = self._problems[start.placement]
        better = improve(start, problem, work, measures, least=self._bases[0][0])
        if better is not None:
            self._keep(better.schedule, start, found)

    def _excess(self, schedule: Schedule) -> float:
        """By how much a rank exceeds the limit."""
        peaks = peak_memory(schedule, self._costs.memory)
        return max(peak - cap * ROUNDING for peak, cap in zip(peaks, self._caps, strict=True))

    def _keep(self, schedule: Schedule, base: Schedule, found: _Found) -> bool:
        """Note a schedule; whether it keeps the limit."""
        excess = self._excess(schedule)
        if found.nearest is None or excess < found.nearest[0]:
            found.nearest = excess, base.name, schedule
        if excess > 0.0:
            return False
        step, known = self._step(schedule), found.fitting.get(base.name)
        if known is None or step < known.step:
            found.fitting[base.name] = _Fitting(step, schedule, base.name)
        return True
