"""Who ran what when: measured by the executor or computed by the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from autosplit.errors import ScheduleError
from autosplit.pipeline.action import Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, from ``start`` to ``end`` in seconds on a clock all ranks share."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step over ``ranks`` ranks."""

    ranks: int
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end over all ranks; 0 without spans."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def busy(self, rank: int) -> float:
        """Seconds in which ``rank`` computes (F, I, W, B); sends and receives do not count.

        Raises:
            ScheduleError: there is no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise ScheduleError(f"no rank {rank} in this timeline: expected 0 to {self.ranks - 1}")
        return sum(
            span.end - span.start
            for span in self.spans
            if span.rank == rank and span.action.kind.is_compute
        )

    def bubble_ratio(self, rank: int | None = None) -> float:
        """Idle time over total time in [0, 1]: of ``rank``, or the mean over all ranks.

        Total time is the makespan, the same for every rank, so a rank that ends early idles until
        the last one ends. 0 for an empty timeline.

        Raises:
            ScheduleError: there is no such rank.
        """
        ranks = range(self.ranks) if rank is None else (rank,)
        busy = sum(self.busy(each) for each in ranks)
        total = self.makespan * len(ranks)
        return 1.0 - busy / total if total > 0.0 else 0.0
