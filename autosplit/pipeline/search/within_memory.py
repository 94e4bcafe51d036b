"""The shortest step within a limit of memory, by all measures together.

Where weight gradients go, what is kept at a partner, what in the host's store, what is made again,
and how much the split itself saves: each costs time in another place, so they are chosen on one
simulated step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.memory.measures import balanced, offloaded, recomputed
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.timeline import Timeline

from .search import caps_of, constructed, named_schedules

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

_WORK = 150_000  # actions that are simulated with measures
_BASES = 3  # schedules without measures that several are tried on, the shortest first


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
    """

    schedule: Schedule
    timeline: Timeline
    peaks: tuple[float, ...]
    measures: tuple[str, ...]
    unlimited: float


class _Kept(NamedTuple):
    """A schedule that was found, and by how much it exceeds the limit."""

    step: float
    schedule: Schedule
    excess: float


class LimitError(ScheduleError):
    """Nothing was found within a limit.

    Attributes:
        least: the least limit that something was found for; infinite if nothing was.
        schedule: what keeps ``least``.
    """

    # Defaults, because an error on its way to another process is made from its message alone.
    def __init__(
        self,
        message: str,
        least: float = math.inf,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(message)
        self.least = least
        self.schedule = schedule


def search_within(
    costs: Costs,
    microbatches: int,
    limit: float | Sequence[float],
    *,
    ranks: int | None = None,
    placement: Sequence[int] | None = None,
    fixed: Sequence[float] = (),
) -> WithinMemory:
    """The shortest step that was found in which no rank holds more than a limit; deterministic.

    What a rank holds is counted by the order of its row (``peak_memory``), which the engine keeps
    whatever transfers take. Measures are taken by their rules, alone and in pairs, on named
    schedules and on those of list scheduling. How much is simulated is bounded.

    Args:
        costs: of every stage.
        microbatches: M >= 1.
        limit: bytes that a rank may hold: one number, or one for each rank.
        ranks: number of processes; None means one for each stage.
        placement: the rank of every stage, where that is settled.
        fixed: per rank, bytes of parameters, gradients and optimizer state, which count towards
            the limit; none where the limit is of activations only.

    Raises:
        LimitError: a limit below what is fixed, or one that no measures keep; says the least for
            which something was found.
        ScheduleError: a bad count.
    """
    count = ranks or len(costs.times)
    limits = caps_of(limit, count)
    rests = [*fixed] if fixed else [0.0] * count
    if len(rests) != count:
        raise ScheduleError(f"expected what is fixed on each of {count} ranks, got {len(rests)}")
    caps = [most - rest for most, rest in zip(limits, rests, strict=True)]
    one = _LimitSearch(costs, microbatches, count, placement, caps)
    # Without room on some rank for what every schedule needs there is nothing to look for.
    found = one.run() if max(one.bound) <= 0.0 else None
    if found is None:
        excess, what, schedule = one.frugal()
        least = max(limits) + excess
        raise LimitError(
            f"no schedule within a limit of {min(limits):,.0f} was found: the least that was needs "
            f"{least:,.0f} ({what}). Use a limit of {math.ceil(least):,}, more ranks, or more and "
            "smaller microbatches",
            least,
            schedule,
        )
    return found


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
    ) -> None:
        self._costs = costs
        self._caps = caps
        self._kept: list[_Kept] = []
        """Those that keep the limit."""
        self._nearest: _Kept | None = None
        named = named_schedules(costs.times, microbatches, ranks, placement)
        places = dict.fromkeys(each.placement for each in named)
        for most in ([math.inf] * ranks, [max(cap, 1.0) for cap in caps]):
            named += constructed(costs, microbatches, places, most)
        in_order = [each for each in named if adds_in_order(each)] or named
        plain = {each.ranks: each for each in in_order}.values()
        self._bases = sorted(((self._step(each), each) for each in plain), key=lambda each: each[0])
        self.bound = self._bound(ranks)
        self.unlimited = self._bases[0][0]

    def _bound(self, ranks: int) -> list[float]:
        """A rank must hold what one microbatch holds on any of its stages; of all placements the
        one that exceeds the limit least counts.
        """
        found = []
        for place in {base.placement for _, base in self._bases}:
            least = [0.0] * ranks
            for stage, rank in enumerate(place):
                least[rank] = max(least[rank], self._costs.memory[stage].least)
            found.append([a - cap * ROUNDING for a, cap in zip(least, self._caps, strict=True)])
        return min(found, key=max)

    def _step(self, schedule: Schedule) -> float:
        return self._costs.timeline(schedule).step_time

    def run(self) -> WithinMemory | None:
        """The best; None if nothing keeps the limit."""
        left = _WORK
        for place, (step, base) in enumerate(self._bases):
            # All that are to come are longer, whatever is done to them.
            if step >= self._shortest or self._keep(base):
                break
            for made in self._measured(base, several=place < _BASES):
                self._keep(made)
                left -= sum(map(len, made.ranks))
                if left < 0:
                    break
        if not self._kept:
            self._try_least()
        if not self._kept:
            return None
        schedule = min(self._kept, key=_step).schedule
        return WithinMemory(
            replace(schedule, name="auto"),
            self._costs.timeline(schedule),
            tuple(peak_memory(schedule, self._costs.memory)),
            _taken(schedule),
            self.unlimited,
        )

    @property
    def _shortest(self) -> float:
        return min(map(_step, self._kept), default=math.inf)

    def _measured(self, base: Schedule, *, several: bool) -> Iterator[Schedule]:
        """A base with each measure; of several, with a second one for what the first leaves too
        much.

        A partner takes only what is not sent to the host or run again: it comes first.
        """
        for first, take in MEASURES.items():
            made = take(base, self._costs, self._caps)
            yield made
            for second in MEASURES if several else ():
                if second not in (first, "balance"):
                    yield MEASURES[second](made, self._costs, self._caps)

    def frugal(self) -> tuple[float, str, Schedule]:
        """What comes nearest to the limit: by how much it exceeds it, what it is, and itself."""
        if self._nearest is None:
            self._try_least()
        if self._nearest is None:  # cannot be: there is a base
            raise ScheduleError("no schedule admits the counts")
        _, schedule, excess = self._nearest
        taken = " and ".join(_taken(schedule)) or "no measure"
        return excess, f"{schedule.name} with {taken}", schedule

    def _try_least(self) -> None:
        """Keep what each measure makes of the most frugal base for the least limit there may be,
        which is the same whatever the limit is: one that a refusal advised finds it again.
        """
        least = [max(cap + over, 1.0) for cap, over in zip(self._caps, self.bound, strict=True)]
        _, base = min(self._bases, key=lambda each: self._excess(each[1]))
        self._keep(base)
        for take in MEASURES.values():
            self._keep(take(base, self._costs, least))

    def _excess(self, schedule: Schedule) -> float:
        """By how much a rank exceeds the limit."""
        peaks = peak_memory(schedule, self._costs.memory)
        return max(peak - cap * ROUNDING for peak, cap in zip(peaks, self._caps, strict=True))

    def _keep(self, schedule: Schedule) -> bool:
        """Note a schedule; whether it keeps the limit."""
        excess = self._excess(schedule)
        fits = excess <= 0.0
        kept = _Kept(self._step(schedule) if fits else math.inf, schedule, excess)
        if self._nearest is None or excess < self._nearest.excess:
            self._nearest = kept
        if fits:
            self._kept.append(kept)
        return fits


def adds_in_order(schedule: Schedule) -> bool:
    """Whether every stage adds gradients up in the order of its microbatches, with the rounding of
    any other schedule that does. Local search keeps that.
    """
    last: dict[int, int] = {}
    for row in schedule.ranks:
        for action in row:
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                if last.get(action.stage, -1) > action.microbatch:
                    return False
                last[action.stage] = action.microbatch
    return True


def _step(kept: _Kept) -> float:
    return kept.step


def _taken(schedule: Schedule) -> tuple[str, ...]:
    """The measures that a schedule takes."""
    kinds = {action.kind for row in schedule.ranks for action in row}
    return tuple(name for name, kind in _KINDS.items() if kind in kinds)
