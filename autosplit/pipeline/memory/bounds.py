"""Bounds of what ranks may hold, one for all or one for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.timeline import Timeline

from .occupancy import Occupancy


def bounds_of(limit: float | Sequence[float], ranks: int) -> Sequence[float]:
    """One bound for each rank.

    Raises:
        ScheduleError: not as many as there are ranks, or a bound below 0.
    """
    bounds = list(limit) if isinstance(limit, Sequence) else [limit] * ranks
    if len(bounds) != ranks or not all(bound >= 0 for bound in bounds):
        raise ScheduleError(
            f"a limit is a number >= 0, or one for each of {ranks} ranks; got {limit!r}"
        )
    return bounds


def refuse_excess(doing: str, schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> None:
    """Refuse a schedule with a rank above its bound.

    Raises:
        ScheduleError: says which rank, and what bound it could keep.
    """
    peaks = costs.peaks(schedule, costs.timeline(schedule))
    for rank, (peak, bound) in enumerate(zip(peaks, bounds, strict=True)):
        if peak > bound * ROUNDING:
            raise ScheduleError(
                f"{doing} leaves rank {rank} of {schedule.name!r} with {peak:g}, more than its "
                f"bound of {bound:g}: raise it to {peak:g}, take another measure as well "
                "(balance, offload, recompute), or cut the batch into smaller microbatches"
            )


def rank_by_rank(
    schedule: Schedule,
    costs: Costs,
    bounds: Sequence[float],
    changed: Callable[[Schedule, Occupancy, float], Iterable[Schedule]],
) -> Schedule:
    """The schedule with each rank in turn brought below its bound, or as near to it as it goes.

    Args:
        schedule: a legal one.
        costs: of every stage.
        bounds: by rank.
        changed: schedules to try for a rank that is above its bound, given what it holds. One that
            waits for itself is passed over; of the others the nearest counts, then the shortest.
    """
    timeline = costs.timeline(schedule)
    for rank, bound in enumerate(bounds):
        if math.isinf(bound):
            continue
        there = Occupancy(schedule, costs, timeline, rank)
        if max(there.level) <= bound * ROUNDING:
            continue
        best: tuple[tuple[float, float], Schedule, Timeline] | None = None
        for tried in changed(schedule, there, bound):
            try:
                ran = costs.timeline(tried)
            except ScheduleError:
                continue
            score = max(0.0, costs.peaks(tried, ran)[rank] - bound * ROUNDING), ran.step_time
            if best is None or score < best[0]:
                best = score, tried, ran
        if best is not None:
            _, schedule, timeline = best
    return schedule
