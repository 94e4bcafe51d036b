"""The shortest step within a limit of memory, by all measures together.

Where weight gradients go, what is kept at a partner, what in the host's store, what is made again,
and how much the split itself saves: each costs time in another place, so they are chosen on one
simulated step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from autosplit.errors import ScheduleError
from autosplit.pipeline.memory import balance, offload, recompute
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.timeline import Timeline
from autosplit.text.names import few

from .named import named_schedules
from .rearrange import rearrange
from .search import caps_of, placements, search

MEASURES: Mapping[str, Callable[[Schedule, Costs, Sequence[float]], Schedule]] = {
    "balance": balance.nearest,
    "offload": offload.nearest,
    "recompute": recompute.nearest,
}
"""What can be done to a schedule that holds too much, by name."""

_BASES = 6  # schedules without measures that several are tried on, the shortest first
_STARTS = 2  # of them, those that other orders are looked for from
_PARTWAY = (0.0, 0.5)  # of the excess, what the first of several measures leaves to the next
_SAME = 1 + 1e-6  # of a step


@dataclass(frozen=True)
class MeasureEffect:
    """What one measure did: seconds that the step is longer for it, and by rank what is saved."""

    measure: str
    seconds: float
    saved: tuple[float, ...]


@dataclass(frozen=True)
class WithinMemory:
    """A schedule within a limit, and how it came to be.

    Attributes:
        schedule: named ``"auto"``.
        timeline: its step.
        peaks: per rank, the most that it holds of its microbatches.
        setting: the memory setting of the split that it is for.
        base: the schedule that the measures were taken on.
        effects: what they did, one after another.
        unlimited: seconds of the shortest step that was found without a limit.
    """

    schedule: Schedule
    timeline: Timeline
    peaks: tuple[float, ...]
    setting: str | int
    base: str
    effects: tuple[MeasureEffect, ...]
    unlimited: float


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

    It is never longer than the shortest that any single measure gives on a named schedule or on
    one that ``search`` finds.

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
        ScheduleError: an unknown measure, a bad count, a limit below what is fixed, or one that no
            measures keep; says the least that would do and what dominates there.
    """
    unknown = [measure for measure in measures if measure not in MEASURES]
    if unknown:
        raise ScheduleError(f"unknown measure {unknown[0]!r}; known: {few(list(MEASURES), 9)}")
    settings = {"saved": costs} if isinstance(costs, Costs) else dict(costs)
    count = ranks or len(next(iter(settings.values())).times)
    caps = _caps(limit, fixed, count)
    found: list[WithinMemory] = []
    least: list[tuple[float, str]] = []
    unlimited = math.inf
    for setting, each in settings.items():
        one = _Search(each, microbatches, count, placement, caps, measures, setting)
        unlimited = min(unlimited, one.unlimited)
        best = one.run(min((f.timeline.step_time for f in found), default=math.inf))
        if best is not None:
            found.append(best)
        least += one.nearest
    if not found:
        raise ScheduleError(_refusal(limit, fixed, caps, least))
    best = min(found, key=lambda each: each.timeline.step_time)
    return replace(best, unlimited=unlimited)


def _caps(limit: float | Sequence[float], fixed: Sequence[float], ranks: int) -> tuple[float, ...]:
    limits = caps_of(limit, ranks)
    if not fixed:
        return limits
    if len(fixed) != ranks:
        raise ScheduleError(f"expected what is fixed on each of {ranks} ranks, got {len(fixed)}")
    for rank, (most, rests) in enumerate(zip(limits, fixed, strict=True)):
        if rests >= most:
            raise ScheduleError(
                f"a limit of {most:,.0f} bytes leaves no room for activations on rank {rank}: "
                f"parameters, gradients and optimizer state alone take {rests:,.0f} there; use "
                "more ranks, or an optimizer that keeps less"
            )
    return tuple(most - rests for most, rests in zip(limits, fixed, strict=True))


def _refusal(
    limit: float | Sequence[float],
    fixed: Sequence[float],
    caps: Sequence[float],
    least: Sequence[tuple[float, str]],
) -> str:
    """What is said of a limit that nothing keeps."""
    excess, what = min(least, default=(math.inf, "no schedule"))
    text = f"no schedule within the limit {limit} was found"
    if math.isfinite(excess):
        rests = max(fixed, default=0.0)
        most = max(cap + rest for cap, rest in zip(caps, fixed or [0.0] * len(caps), strict=True))
        dominates = "activations" if rests < most / 2 else "parameters and optimizer state"
        text += (
            f"; the least that was comes {excess:,.0f} above it ({what}), and {dominates} take "
            f"most of that: use a limit of {most + excess:,.0f}"
        )
    return f"{text}, or cut the batch into more and smaller microbatches"


class _Search:
    """One setting's search.

    Attributes:
        unlimited: seconds of the shortest step without a limit.
        nearest: by how much schedules that do not keep the limit exceed it, with what they are.
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
        self._costs = costs
        self._caps = caps
        self._measures = measures
        self._setting = setting
        self.nearest: list[tuple[float, str]] = []
        self._best: WithinMemory | None = None
        self._bases = self._found(microbatches, ranks, placement)
        self.unlimited = min((each.step_time for _, each in self._bases), default=math.inf)

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
        for cap in (math.inf, self._caps):
            try:
                one = search(costs, microbatches, ranks=ranks, placement=placement, cap=cap)
            except ScheduleError:
                continue
            named.append(one)
        rows = {each.ranks: (each, costs.timeline(each)) for each in named}
        return sorted(rows.values(), key=lambda each: each[1].step_time)

    def run(self, shortest: float) -> WithinMemory | None:
        """The best; None if nothing keeps the limit, or is shorter than what is known."""
        for tried, (base, timeline) in enumerate(self._bases):
            best = shortest if self._best is None else self._best.timeline.step_time
            if timeline.step_time >= best:
                break
            several = tried < _BASES or self._best is None
            self._measured(base, timeline, len(self._measures) if several else 1)
        self._rearranged()
        return self._best

    def _rearranged(self) -> None:
        """What the best becomes with other orders, and what shorter ones without measures do."""
        best = self._best
        least = self._bases[0][1].step_time if self._bases else 0.0
        if not self._measures or (best is not None and best.timeline.step_time <= least * _SAME):
            return
        starts = [base for base, _ in self._bases[:_STARTS]]
        if best is not None:
            starts.insert(0, best.schedule)
        for start in starts:
            found = rearrange(start, self._costs, self._caps, self._measures, len(starts))
            if found is not None:
                effects = best.effects if best is not None and start is best.schedule else ()
                self._keep(found, self._costs.timeline(found), start, effects)

    def _measured(self, base: Schedule, timeline: Timeline, most: int) -> None:
        """The base with every chain of so many measures, until one of them costs nothing."""
        if self._keep(base, timeline, base, ()):
            return
        for chain in self._chains(most):
            for partway in _PARTWAY if len(chain) > 1 else (0.0,):
                made = self._applied(base, timeline, chain, partway)
                if made is None:
                    continue
                schedule, ran, effects = made
                kept = self._keep(schedule, ran, base, effects)
                if kept and ran.step_time <= timeline.step_time * _SAME:
                    return

    def _chains(self, most: int) -> Iterator[tuple[str, ...]]:
        for length in range(1, most + 1):
            for chain in permutations(self._measures, length):
                # What was run again or sent to the host is not there for a partner to take.
                if "balance" not in chain[1:]:
                    yield chain

    def _applied(
        self, base: Schedule, timeline: Timeline, chain: Sequence[str], partway: float
    ) -> tuple[Schedule, Timeline, tuple[MeasureEffect, ...]] | None:
        """The base with the measures of a chain; None where one of them has nothing to do."""
        schedule, ran = base, timeline
        peaks = self._costs.peaks(base, timeline)
        effects: list[MeasureEffect] = []
        for place, measure in enumerate(chain):
            last = place == len(chain) - 1
            part = 0.0 if last else partway
            bounds = [
                cap + part * max(0.0, peak - cap)
                for cap, peak in zip(self._caps, peaks, strict=True)
            ]
            changed = MEASURES[measure](schedule, self._costs, bounds)
            if changed is schedule or changed.ranks == schedule.ranks:
                return None
            now = self._costs.timeline(changed)
            held = self._costs.peaks(changed, now)
            saved = tuple(a - b for a, b in zip(peaks, held, strict=True))
            effects.append(MeasureEffect(measure, now.step_time - ran.step_time, saved))
            schedule, ran, peaks = changed, now, held
        return schedule, ran, tuple(effects)

    def _keep(
        self,
        schedule: Schedule,
        timeline: Timeline,
        base: Schedule,
        effects: tuple[MeasureEffect, ...],
    ) -> bool:
        """Note a schedule; whether it keeps the limit."""
        peaks = self._costs.peaks(schedule, timeline)
        excess = max(peak - cap * ROUNDING for peak, cap in zip(peaks, self._caps, strict=True))
        if excess > 0.0:
            taken = ", ".join(effect.measure for effect in effects) or "no measure"
            self.nearest.append((excess, f"{base.name} with {taken}"))
            return False
        if self._best is None or timeline.step_time < self._best.timeline.step_time:
            self._best = WithinMemory(
                replace(schedule, name="auto"),
                timeline,
                tuple(peaks),
                self._setting,
                base.name,
                effects,
                math.inf,
            )
        return True
