"""Bounds of what ranks may hold, one for all or one for each."""

from __future__ import annotations

from collections.abc import Sequence

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING
from autosplit.pipeline.simulation.step_costs import Costs


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
