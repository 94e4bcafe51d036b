"""The shortest step within a limit of memory, by all measures together.

Where weight gradients go, what is kept at a partner, what in the host's store, what is made again,
and how much the split itself saves: each costs time in another place, so they are chosen on one
simulated step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.search.measures import Measure, balanced, caps_of, offloaded, recomputed
from autosplit.pipeline.simulation.activation_memory import ROUNDING, peak_memory
from autosplit.pipeline.simulation.simulate import Costs

from .search import constructed, named_schedules

MEASURES: Mapping[str, Measure] = {
    "balance": balanced,
    "offload": offloaded,
    "recompute": recomputed,
}
"""What can be done to a schedule that holds too much, by name."""

_ALONE: list[tuple[Measure, ...]] = [(take,) for take in MEASURES.values()]
# A partner takes only what is not sent to the host or run again: it comes first.
_IN_PAIRS: list[tuple[Measure, ...]] = [
    (first, second)
    for first in MEASURES.values()
    for second in MEASURES.values()
    if second not in (first, balanced)
]
_WORK = 150_000  # actions that are simulated with measures
_BASES = 3  # schedules without measures that several are tried on, the shortest first


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
) -> Schedule:
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
    found = _LimitSearch(costs, microbatches, count, placement, caps).run()
    if found.excess > 0.0:
        least = max(limits) + found.excess
        raise LimitError(
            f"no schedule within a limit of {min(limits):,.0f} was found: the least that was needs "
            f"{least:,.0f}. Use a limit of {math.ceil(least):,}, more ranks, or more and smaller "
            "microbatches",
            least,
            found.schedule,
        )
    return replace(found.schedule, name="auto")


class _Tried(NamedTuple):
    """What is less is better: seconds of a step, infinite above the limit, then the bytes by which
    a rank exceeds it.
    """

    step: float
    excess: float
    schedule: Schedule

    @property
    def key(self) -> tuple[float, float]:
        return self.step, self.excess


class _LimitSearch:
    """One setting's search; arguments are those of ``search_within``."""

    def __init__(
        self,
        costs: Costs,
        microbatches: int,
        ranks: int,
        placement: Sequence[int] | None,
        caps: Sequence[float],
    ) -> None:
        self._costs, self._caps = costs, caps
        named = named_schedules(costs.times, microbatches, ranks, placement)
        places = dict.fromkeys(each.placement for each in named)
        for most in ([math.inf] * ranks, [max(cap, 1.0) for cap in caps]):
            named += constructed(costs, microbatches, places, most)
        in_order = [each for each in named if adds_in_order(each)] or named
        plain = {each.ranks: each for each in in_order}.values()
        self._bases = sorted(plain, key=self._step)

    def run(self) -> _Tried:
        """The shortest step within the limit, or what comes nearest to it."""
        bound = self._bound()
        # Without room on some rank for what every schedule needs there is nothing to look for.
        found = [*self._measured()] if max(bound) <= 0.0 else []
        if all(each.excess > 0.0 for each in found):
            found += self._frugal(bound)
        return min(found, key=lambda each: each.key)

    def _bound(self) -> list[float]:
        """Per rank, by how much what every schedule holds exceeds the limit: it must hold what one
        microbatch holds on any of its stages. Of all placements the one with the least counts.
        """
        found = []
        for place in dict.fromkeys(base.placement for base in self._bases):
            least = [0.0] * len(self._caps)
            for stage, rank in enumerate(place):
                least[rank] = max(least[rank], self._costs.memory[stage].least)
            found.append([a - cap * ROUNDING for a, cap in zip(least, self._caps, strict=True)])
        return min(found, key=max)

    def _measured(self) -> Iterator[_Tried]:
        """Bases, the shortest first, with each measure; of some with a second one for what the
        first leaves too much.
        """
        left, shortest = _WORK, math.inf
        for place, base in enumerate(self._bases):
            plain = self._tried(base)
            yield plain
            # All that are to come are longer, whatever is done to them.
            if plain.excess <= 0.0 or self._step(base) >= shortest:
                return
            for measures in [*_ALONE, *(_IN_PAIRS if place < _BASES else ())]:
                made = base
                for take in measures:
                    made = take(made, self._costs, self._caps)
                one = self._tried(made)
                yield one
                shortest = min(shortest, one.step)
                left -= sum(map(len, made.ranks))
                if left < 0:
                    return

    def _frugal(self, bound: Sequence[float]) -> Iterator[_Tried]:
        """What each measure makes of the most frugal base for the least limit there may be, which
        is the same whatever the limit is: one that a refusal advised finds it again.
        """
        least = [max(cap + over, 1.0) for cap, over in zip(self._caps, bound, strict=True)]
        base = min(map(self._tried, self._bases), key=lambda each: each.excess)
        yield base
        for take in MEASURES.values():
            yield self._tried(take(base.schedule, self._costs, least))

    def _tried(self, schedule: Schedule) -> _Tried:
        peaks = peak_memory(schedule, self._costs.memory)
        excess = max(p - cap * ROUNDING for p, cap in zip(peaks, self._caps, strict=True))
        return _Tried(self._step(schedule) if excess <= 0.0 else math.inf, excess, schedule)

    def _step(self, schedule: Schedule) -> float:
        return self._costs.timeline(schedule).step_time


def adds_in_order(schedule: Schedule) -> bool:
    """Whether every stage adds gradients up in the order of its microbatches, with the rounding of
    any other schedule that does.
    """
    last: dict[int, int] = {}
    for row in schedule.ranks:
        for action in row:
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                if last.get(action.stage, -1) > action.microbatch:
                    return False
                last[action.stage] = action.microbatch
    return True
