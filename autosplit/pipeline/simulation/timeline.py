"""Who ran what when: measured by the executor or computed by the simulator."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Action, ActionKind


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, from ``start`` to ``end`` in seconds on a clock all ranks share."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step over ``ranks`` ranks.

    ``crosses_step``: see ``Schedule``.
    """

    ranks: int
    spans: tuple[Span, ...]
    crosses_step: bool = False

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end over all ranks; 0 without spans."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def step_time(self) -> float:
        """Seconds from one step to the next when step follows step without a pause.

        The makespan; but where ranks do not wait for each other between steps, the longest time
        from a rank's first start to its last end, for then each step fits into the last one's end
        as it is.
        """
        if not self.crosses_step:
            return self.makespan
        ends: dict[int, tuple[float, float]] = {}
        for span in self.spans:
            start, end = ends.get(span.rank, (span.start, span.end))
            ends[span.rank] = min(start, span.start), max(end, span.end)
        return max((end - start for start, end in ends.values()), default=0.0)

    def window(self, rank: int) -> tuple[float, float]:
        """From when to when this step has ``rank``: of steps that overlap, each rank's begins with
        its own first action.
        """
        start = min((span.start for span in self.spans), default=0.0)
        if self.crosses_step:
            start = min((span.start for span in self.spans if span.rank == rank), default=start)
        return start, start + self.step_time

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

        Total time is the step time, the same for every rank, so a rank that ends early idles
        until the last one ends. 0 for an empty timeline.

        Raises:
            ScheduleError: there is no such rank.
        """
        ranks = range(self.ranks) if rank is None else (rank,)
        busy = sum(self.busy(each) for each in ranks)
        total = self.step_time * len(ranks)
        return 1.0 - busy / total if total > 0.0 else 0.0


def median_durations(steps: Iterable[Iterable[Span]]) -> dict[tuple[int, ActionKind], float]:
    """Median seconds of each kind of action of each stage, by (stage, kind).

    Args:
        steps: the spans of each step.
    """
    found: dict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    for spans in steps:
        for span in spans:
            found[span.action.stage, span.action.kind].append(span.end - span.start)
    return {key: statistics.median(values) for key, values in found.items()}
