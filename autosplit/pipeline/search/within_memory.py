"""Search for the shortest step within a memory limit, with all remedies together.

The placement of weight gradients, balancing, offloading and recomputing each cost time at another
place of the step. So they are chosen together, on one simulated step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from operator import itemgetter
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING, peak_memory
from autosplit.pipeline.simulation.simulate import Costs

from .bounding import MemoryRemedy, caps_of
from .remedies import REMEDIES
from .search import constructed, named_schedules, reduced_early

_ALONE: list[tuple[MemoryRemedy, ...]] = [(remedy,) for remedy in REMEDIES.values()]
# Balancing comes first: a partner takes only what is neither offloaded nor recomputed.
_IN_PAIRS: list[tuple[MemoryRemedy, ...]] = [
    (REMEDIES[first], REMEDIES[second])
    for first, second in permutations(REMEDIES, 2)
    if second != "balance"
]
_WORK = 150_000  # actions that are simulated with remedies
_BASES = 3  # schedules on which pairs of remedies are tried, the shortest first


class LimitError(ScheduleError):
    """No schedule was found within a memory limit.

    Attributes:
        least: the smallest limit for which a schedule was found; infinite if none was found.
        schedule: the schedule that keeps the limit ``least``.
    """

    # With defaults, because an error that is sent to another process is rebuilt from its message.
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
    """Find the schedule with the shortest step in which no rank exceeds a limit; deterministic.

    The memory of a rank follows from the order of its row (``peak_memory``), however long transfers
    take. Remedies are tried alone and in pairs, on named schedules and on schedules of list
    scheduling. The number of simulated actions is bounded.

    Args:
        costs: the costs of every stage.
        microbatches: the number of microbatches, at least 1.
        limit: bytes that a rank may hold: one number, or one for each rank.
        ranks: number of processes; None means one for each stage.
        placement: the rank of every stage; None leaves it open.
        fixed: per rank, bytes of parameters, gradients and optimizer state, which count towards
            the limit; empty if the limit is for activations only.

    Raises:
        LimitError: the limit is below the fixed memory, or no remedy keeps it; names the smallest
            limit for which a schedule was found.
        ScheduleError: a count is not an integer of at least 1.
    """
    count = ranks or len(costs.times)
    limits = caps_of(limit, count)
    fixed = fixed or [0.0] * count
    if len(fixed) != count:
        raise ScheduleError(
            f"fixed= needs the bytes of each of {count} ranks; got {len(fixed)} numbers"
        )
    caps = [total - size for total, size in zip(limits, fixed, strict=True)]
    best = _LimitSearch(costs, microbatches, count, placement, caps).run()
    if best.excess > 0.0:
        least = max(limits) + best.excess
        raise LimitError(
            f"no schedule within a limit of {min(limits):,.0f} bytes a rank was found: the most "
            f"frugal schedule needs {least:,.0f}. Use a limit of {math.ceil(least):,}, more ranks, "
            "or more and smaller microbatches",
            least,
            best.schedule,
        )
    return replace(best.schedule, name="auto")


class _Candidate(NamedTuple):
    """A schedule, the seconds of its step (infinite above the limit), and the bytes by which a rank
    exceeds the limit. The best candidate has the fewest seconds, then the fewest bytes.
    """

    step: float
    excess: float
    schedule: Schedule


class _LimitSearch:
    """One call of ``search_within``, with its arguments."""

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
        placements = dict.fromkeys(schedule.placement for schedule in named)
        for most in ([math.inf] * ranks, [max(cap, 1.0) for cap in caps]):
            named += constructed(costs, microbatches, placements, most)
        named += [*reduced_early(named, costs)]
        in_order = [schedule for schedule in named if adds_in_order(schedule)] or named
        plain = {schedule.ranks: schedule for schedule in in_order}.values()
        self._bases = sorted(plain, key=self._step)

    def run(self) -> _Candidate:
        """The candidate with the shortest step within the limit, or the nearest to it."""
        excess = self._least_excess()
        # If every schedule exceeds the limit on some rank, no remedy helps.
        candidates = [*self._remedied()] if max(excess) <= 0.0 else []
        if all(candidate.excess > 0.0 for candidate in candidates):
            candidates += self._frugal(excess)
        return min(candidates, key=itemgetter(0, 1))

    def _least_excess(self) -> list[float]:
        """Bytes by which each rank exceeds the limit even with a single microbatch of its largest
        stage, which every schedule holds. The placement with the smallest excess is used.
        """
        excesses = []
        for placement in dict.fromkeys(base.placement for base in self._bases):
            least = [0.0] * len(self._caps)
            for stage, rank in enumerate(placement):
                least[rank] = max(least[rank], self._costs.memory[stage].least)
            pairs = zip(least, self._caps, strict=True)
            excesses.append([size - cap * ROUNDING for size, cap in pairs])
        return min(excesses, key=max)

    def _remedied(self) -> Iterator[_Candidate]:
        """Yield the base schedules, the shortest first, alone and with each remedy. The first few
        are also tried with a second remedy, for activations that the first remedy leaves above the
        limit.
        """
        work, shortest = _WORK, math.inf
        for number, base in enumerate(self._bases):
            plain = self._candidate(base)
            yield plain
            # All later bases have longer steps, whatever the remedy.
            if plain.excess <= 0.0 or self._step(base) >= shortest:
                return
            for remedies in [*_ALONE, *(_IN_PAIRS if number < _BASES else ())]:
                schedule = base
                for remedy in remedies:
                    schedule = remedy(schedule, self._costs, self._caps)
                candidate = self._candidate(schedule)
                yield candidate
                shortest = min(shortest, candidate.step)
                work -= sum(map(len, schedule.ranks))
                if work < 0:
                    return

    def _frugal(self, excess: Sequence[float]) -> Iterator[_Candidate]:
        """Yield the base schedule with the smallest peak, alone and with each remedy, for the
        smallest limit that any schedule can keep. That limit does not depend on the user's limit.
        So a search with the limit that an error advised finds the same schedule.
        """
        least = [max(cap + over, 1.0) for cap, over in zip(self._caps, excess, strict=True)]
        base = min(map(self._candidate, self._bases), key=lambda candidate: candidate.excess)
        yield base
        for remedy in REMEDIES.values():
            yield self._candidate(remedy(base.schedule, self._costs, least))

    def _candidate(self, schedule: Schedule) -> _Candidate:
        peaks = peak_memory(schedule, self._costs.memory)
        excess = max(peak - cap * ROUNDING for peak, cap in zip(peaks, self._caps, strict=True))
        return _Candidate(self._step(schedule) if excess <= 0.0 else math.inf, excess, schedule)

    def _step(self, schedule: Schedule) -> float:
        return self._costs.timeline(schedule).step_time


def adds_in_order(schedule: Schedule) -> bool:
    """Whether every stage adds gradients in the order of its microbatches. All schedules that do so
    give the same bits.
    """
    last: dict[int, int] = {}
    for row in schedule.ranks:
        for action in row:
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                if last.get(action.stage, -1) > action.microbatch:
                    return False
                last[action.stage] = action.microbatch
    return True
