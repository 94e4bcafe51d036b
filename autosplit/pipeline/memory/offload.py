"""Activations in the host's store while nobody needs them.

Source: PipeOffload (Wan et al., arXiv 2503.01328). What lives longest for its bytes goes first:
each byte of it is away for the longest time for the same two transfers. The transfers go on beside
computation, and what a row sends away is waited for only by what takes its place, so that a
schedule knows from its own times what the store's bandwidth allows for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.step_costs import Costs

from .bounds import bounds_of, rank_by_rank, refuse_excess
from .occupancy import Held, Occupancy
from .trips import choose_trips, to_host

_LEADS = (0, 1, 2, 4)
_WAYS = ((False, False), (True, False), (False, True))  # smooth, strict: see choose_trips
_FREE = 1.002  # of a step: what is no slower than that costs nothing
_HALVINGS = 7


def offload(
    schedule: Schedule, costs: Costs, limit: float | Sequence[float] | None = None
) -> Schedule:
    """The schedule in which no rank holds more than ``limit``, with what is beyond in its store.

    Args:
        schedule: a legal one.
        costs: of every stage; ``costs.transfer.host`` is the link to the store.
        limit: the most a rank may hold of its microbatches at once, in time, in the unit of
            ``costs.memory``: one number, or one for each rank. None: as little as the store's
            bandwidth allows at no cost.

    Raises:
        ScheduleError: the limit cannot be kept; says what could.
    """
    if limit is None:
        return _free(schedule, costs)
    bounds = bounds_of(limit, len(schedule.ranks))
    found = nearest(schedule, costs, bounds)
    refuse_excess("offloading", found, costs, bounds)
    return found


def nearest(schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> Schedule:
    """The schedule that offloads until bounds are kept, or that comes as near to that as it can."""
    return rank_by_rank(schedule, costs, bounds, partial(_offloaded, costs))


def _offloaded(
    costs: Costs, schedule: Schedule, there: Occupancy, bound: float
) -> Iterator[Schedule]:
    """With what is beyond the bound away, by several looks ahead."""
    if not there.held:
        return
    link = costs.transfer.host or Link()

    def size(held: Held) -> float:
        return min(held.size, schedule.moved.get(held.stage, held.size))

    def life(held: Held) -> float:
        return there.starts[held.used] - there.ends[held.made]

    piece = max(size(held) / costs.memory[held.stage].tensors for held in there.held)
    for lead, (smooth, strict) in product(_LEADS, _WAYS):
        trips, _ = choose_trips(
            there,
            bound - (piece if smooth else 0.0),
            size,
            lambda held: link.latency + size(held) / link.bandwidth,
            lead=lead,
            prefer=life,
            smooth=smooth,
            strict=strict,
        )
        yield to_host(schedule, there, trips)


def _free(schedule: Schedule, costs: Costs) -> Schedule:
    """The least bounds, all by one share of what ranks hold, at which the step is as long."""
    plain = costs.timeline(schedule)
    peaks = costs.peaks(schedule, plain)
    found, low, high = schedule, 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        tried = nearest(schedule, costs, [share * peak for peak in peaks])
        if costs.timeline(tried).step_time <= plain.step_time * _FREE:
            found, high = tried, share
        else:
            low = share
    return found
