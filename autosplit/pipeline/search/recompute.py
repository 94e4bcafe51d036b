"""Recompute activations: for microbatches beyond a bound, F keeps only the stage's inputs, and runs
again.

RECOMPUTE is an action of its own before the backward that needs the activations. So it can run
while the rank waits for gradients, and serves both I and W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.simulation.simulate import Costs

from .bounding import OffloadWindow, bring_below, insert, keep_limit, necessary, single_ranks
from .rank_timeline import RankTimeline, Residency


def recompute(schedule: Schedule, costs: Costs, limit: float | Sequence[float]) -> Schedule:
    """Add recomputations to a schedule, so that no rank holds more than ``limit``.

    Args:
        schedule: a legal schedule.
        costs: the costs of every stage, with the size of the inputs that F keeps.
        limit: the most that a rank may hold of its microbatches at once, in the unit of
            ``costs.memory``: one number, or one for each rank.

    Raises:
        ScheduleError: the limit cannot be kept; the text has a limit that recomputing can keep.
    """
    return keep_limit("recomputing", recomputed, schedule, costs, limit)


def recomputed(schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> Schedule:
    """Add recomputations until bounds are kept, or until no further recomputation helps."""

    def freed(residency: Residency) -> float:
        return residency.size - costs.memory[residency.stage].dropped

    def propose(schedule: Schedule, sides: Sequence[RankTimeline]) -> Iterator[Schedule]:
        """Yield the schedule in which one rank recomputes just enough activations to keep its
        bound.
        """
        (timeline,) = sides
        candidates = (
            OffloadWindow(r, r.first + 1, r.first + 1, r.last)
            for r in timeline.residencies
            if timeline.kinds[r.first] is ActionKind.FORWARD and freed(r) > 0.0
        )
        # A recomputation that would run in a wait is dropped last.
        windows = sorted(
            (window for window in candidates if window.slots),
            key=lambda window: timeline.idle_seconds(window.arrival),
        )
        windows = necessary(timeline.level, bounds[timeline.rank], windows, freed)
        actions = [(window.arrival, window.action(ActionKind.RECOMPUTE)) for window in windows]
        yield insert(schedule, [(timeline, actions)])

    return bring_below(schedule, costs, bounds, single_ranks(schedule), propose)
