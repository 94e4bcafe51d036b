"""One search within a limit: schedules without measures, those with each, and other orders."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING, peak_memory
from autosplit.pipeline.simulation.counted_costs import CountedCosts
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.timeline import Timeline

from .limit_findings import Fitting, Found, MeasureEffect, WithinMemory
from .measures import MEASURES, chains
from .named import named_schedules
from .order_changes import adds_in_order
from .rearrange import rearrange
from .relief import early
from .row_removals import without
from .search import placements, search

_ALONE = 100_000
"""Actions simulated for one setting with one measure; what ``search`` plays is beside that."""

_TOGETHER = 240_000  # with all of them, behind that
_ORDERS = 60_000  # actions that each search for an order without measures plays
_STARTS = 3  # schedules that other orders are looked for from
_BASES = 3  # schedules without measures that several are tried on, the shortest first
_PARTWAY = (0.0, 0.5)  # of the excess, what the first of several measures leaves to the next
_SHORT = 0.6  # of the work with several measures is a look from each start, the rest for the best
_SAME = 1 + 1e-6  # of a step


class LimitSearch:
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
        setting: str | int,
    ) -> None:
        self._costs = CountedCosts.of(costs)
        self._caps = caps
        self._measures = measures
        self._setting = setting
        self._found_by: dict[tuple[str, ...], Found] = defaultdict(Found)
        """By the measures that were tried."""
        self._bases = self._found(microbatches, ranks, placement)
        self.bound = self._bound(ranks)
        self.unlimited = min((each.step_time for _, each in self._bases), default=math.inf)

    @property
    def simulated(self) -> int:
        """Actions played so far."""
        return self._costs.tally.actions

    def _bound(self, ranks: int) -> list[float]:
        """A rank must hold what one microbatch holds on any of its stages; of all placements the
        one that exceeds the limit least counts.
        """
        found = []
        for place in {base.placement for base, _ in self._bases}:
            least = [0.0] * ranks
            for stage, rank in enumerate(place):
                least[rank] = max(least[rank], self._costs.memory[stage].least)
            found.append([a - cap * ROUNDING for a, cap in zip(least, self._caps, strict=True)])
        return min(found, key=max)

    def _found(
        self, microbatches: int, ranks: int, placement: Sequence[int] | None
    ) -> list[tuple[Schedule, Timeline]]:
        """Schedules without measures, the shortest first; the best within the limit among them."""
        costs = self._costs
        places = set(placements(costs, microbatches, ranks, placement))
        named = [
            each
            for each in named_schedules(costs.times, microbatches, ranks)
            if each.placement in places
        ]
        roomy = [max(cap, 1.0) for cap in self._caps]
        for cap in (math.inf, roomy):
            try:
                one = search(
                    costs, microbatches, ranks=ranks, placement=placement, cap=cap, work=_ORDERS
                )
            except ScheduleError:
                continue
            named.append(one)
        in_order = [each for each in named if adds_in_order(each)]
        # Whether steps overlap is not for a row to say.
        plain = [replace(each, crosses_step=False) for each in in_order or named]
        rows = {each.ranks: (each, costs.timeline(each)) for each in plain}
        return sorted(rows.values(), key=lambda each: each[1].step_time)

    def run(self) -> WithinMemory | None:
        """The best; None if nothing keeps the limit.

        What one measure alone gives is what it gives where no other may be taken.
        """
        for measure in self._measures:
            self._within((measure,), _ALONE)
        if len(self._measures) != 1:
            self._within(tuple(self._measures), _TOGETHER)
        fitting = [each for found in self._found_by.values() for each in found.fitting.values()]
        if not fitting:
            return None
        best = self._described(min(fitting, key=lambda each: each.step))
        return replace(best, effects=tuple(self._effects(best)))

    def _within(self, measures: tuple[str, ...], work: int) -> None:
        """Look for the best with some measures, in so many actions."""
        begun, found = self.simulated, self._found_by[measures]
        for tried, (base, timeline) in enumerate(self._bases):
            if timeline.step_time >= found.shortest:
                break
            longest = len(measures) if tried < _BASES else 1
            if not self._keep(base, timeline, base, found):
                self._measured(base, timeline, measures, longest, begun + work // 2)
        self._rearranged(measures, found, begun + work)

    def frugal(self) -> tuple[float, str, Schedule]:
        """What comes nearest to the limit: by how much it exceeds it, what it is, and itself."""
        found = self._found_by[()]
        nearest = self._nearest()
        if nearest is None or nearest[0] > max(self.bound):
            least = [max(cap + over, 1.0) for cap, over in zip(self._caps, self.bound, strict=True)]
            for base, timeline in self._bases:
                self._keep(base, timeline, base, found)
            base, _ = min(self._bases, key=lambda each: self._excess(each[0]))
            for measure in self._measures:
                changed = MEASURES[measure](base, self._costs, least)
                self._keep(changed, self._costs.timeline(changed), base, found)
            nearest = self._nearest()
        if nearest is None:  # there is a base, or the counts were refused
            raise ScheduleError("no schedule was found")
        excess, base_name, schedule = nearest
        taken = " and ".join(name for name in MEASURES if without(schedule, name) != schedule)
        return excess, f"{base_name} with {taken or 'no measure'}", schedule

    def _nearest(self) -> tuple[float, str, Schedule] | None:
        every = [found.nearest for found in self._found_by.values() if found.nearest is not None]
        return min(every, key=lambda each: each[0], default=None)

    def _effects(self, found: WithinMemory) -> Iterator[MeasureEffect]:
        """Of each measure that is taken, what the step would be, and ranks hold, without it."""
        for measure in MEASURES:
            less = without(found.schedule, measure)
            if less == found.schedule:
                continue
            timeline, peaks = self._costs.played(less)
            saved = tuple(max(0.0, a - b) for a, b in zip(peaks, found.peaks, strict=True))
            longer = found.timeline.step_time - timeline.step_time
            yield MeasureEffect(measure, max(0.0, longer), saved)

    def _rearranged(self, measures: tuple[str, ...], found: Found, most: int) -> None:
        """What the best become with other orders, and what shorter ones without measures do."""
        least = self._bases[0][1].step_time if self._bases else 0.0
        known = [found]
        if len(measures) > 1:
            known = [*self._found_by.values()]
        if not self._bases or min(each.shortest for each in known) <= least * _SAME:
            return
        fitting = sorted(
            (fits for each in known for fits in each.fitting.values()), key=lambda each: each.step
        )
        starts = [*{fits.schedule.ranks: fits.schedule for fits in fitting}.values()]
        nearest = found.nearest
        if nearest is not None and not starts:
            starts.append(nearest[2])
        first = self._bases[0][0]
        starts = [*starts[: _STARTS - 1], first]
        together = len(measures) > 1
        if together:
            starts.append(early(first, measures, self._costs, self._caps))
        whole = max(0, most - self.simulated)
        end = self.simulated + int(whole * (_SHORT if together else 1.0))
        for place, start in enumerate(starts):
            share = max(0, end - self.simulated) // (len(starts) - place)
            self._walked(start, share, measures, found, least)
        if together and found.fitting:
            best = min(found.fitting.values(), key=lambda each: each.step).schedule
            self._walked(best, max(0, most - self.simulated), measures, found, least)

    def _walked(
        self, start: Schedule, work: int, measures: tuple[str, ...], found: Found, least: float
    ) -> None:
        """Keep what a start becomes in so many actions."""
        better = rearrange(start, self._costs, self._caps, measures, work, least=least)
        if better is not None:
            self._keep(better, self._costs.timeline(better), start, found)

    def _measured(
        self,
        base: Schedule,
        timeline: Timeline,
        measures: Sequence[str],
        longest: int,
        most: int,
    ) -> None:
        """The base with every chain of so many measures, until one of them costs nothing."""
        found = self._found_by[tuple(measures)]
        for chain in chains(measures, longest):
            if len(chain) > 1 and self.simulated > most:
                return
            for partway in _PARTWAY if len(chain) > 1 else (0.0,):
                made = self._applied(base, chain, partway)
                if made is None:
                    continue
                ran = self._costs.timeline(made)
                fits = self._keep(made, ran, base, found)
                if fits and ran.step_time <= timeline.step_time * _SAME:
                    return

    def _applied(self, base: Schedule, chain: Sequence[str], partway: float) -> Schedule | None:
        """The base with the measures of a chain; None where one of them has nothing to do."""
        schedule = base
        for place, measure in enumerate(chain):
            part = 0.0 if place == len(chain) - 1 else partway
            peaks = peak_memory(schedule, self._costs.memory)
            bounds = [
                cap + part * max(0.0, peak - cap)
                for cap, peak in zip(self._caps, peaks, strict=True)
            ]
            changed = MEASURES[measure](schedule, self._costs, bounds)
            if changed.ranks == schedule.ranks:
                return None
            schedule = changed
        return schedule

    def _excess(self, schedule: Schedule) -> float:
        """By how much a rank exceeds the limit."""
        peaks = peak_memory(schedule, self._costs.memory)
        return max(peak - cap * ROUNDING for peak, cap in zip(peaks, self._caps, strict=True))

    def _keep(self, schedule: Schedule, timeline: Timeline, base: Schedule, found: Found) -> bool:
        """Note a schedule; whether it keeps the limit."""
        excess = self._excess(schedule)
        if found.nearest is None or excess < found.nearest[0]:
            found.nearest = excess, base.name, schedule
        if excess > 0.0:
            return False
        known = found.fitting.get(base.name)
        if known is None or timeline.step_time < known.step:
            found.fitting[base.name] = Fitting(timeline.step_time, schedule, timeline, base.name)
        return True

    def _described(self, best: Fitting) -> WithinMemory:
        return WithinMemory(
            replace(best.schedule, name="auto"),
            best.timeline,
            tuple(peak_memory(best.schedule, self._costs.memory)),
            self._setting,
            best.base,
            (),
            math.inf,
        )
