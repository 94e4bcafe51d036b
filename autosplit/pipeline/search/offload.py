"""Offload memory: activations beyond a bound are kept in the host's memory until they are needed.

Source: PipeOffload (Wan et al., arXiv 2503.01328). The activations that live longest are offloaded:
all need the same two transfers, however long they live.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from operator import itemgetter

from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import peak_memory
from autosplit.pipeline.simulation.simulate import Costs

from .bounding import (
    PlacementRule,
    bring_below,
    insert,
    keep_limit,
    necessary,
    offload_windows,
    single_ranks,
)
from .rank_timeline import RankTimeline

_RULES = [PlacementRule(lead, waits) for lead, waits in product((0, 1, 2), (False, True))]
_FREE = 1.002  # a step up to this much longer counts as no longer
_HALVINGS = 7


def offload(
    schedule: Schedule, costs: Costs, limit: float | Sequence[float] | None = None
) -> Schedule:
    """Add offloads to a schedule, so that no rank holds more than ``limit``; the excess is kept in
    the host's memory.

    Args:
        schedule: a legal schedule.
        costs: the costs of every stage; ``costs.transfer.host`` is the link to the host's memory.
        limit: the most that a rank may hold of its microbatches at once, however long transfers
            take, in the unit of ``costs.memory``: one number, or one for each rank. None: the least
            that the link's bandwidth allows without a longer step.

    Raises:
        ScheduleError: the limit cannot be kept; the text has a limit that offloading can keep.
    """
    if limit is None:
        return _offload_for_free(schedule, costs)
    return keep_limit("offloading", offloaded, schedule, costs, limit)


def offloaded(schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> Schedule:
    """Add offloads until bounds are kept, or until no further offload helps."""

    def propose(schedule: Schedule, sides: Sequence[RankTimeline]) -> Iterator[Schedule]:
        """Yield schedules in which one rank offloads just enough to keep its bound, by different
        choices of windows.
        """
        (timeline,) = sides
        for rule, order, fraction in product(_RULES, (1, -1), (1.0, 0.75)):
            # Offload what is used last, or first; a lower bound may leave each transfer more time.
            windows = offload_windows(timeline, rule, 0)[::order]
            windows = necessary(timeline.level, fraction * bounds[timeline.rank], windows)
            moves = [(window.out, 0, window.action(ActionKind.OFFLOAD)) for window in windows]
            moves += [(w.out, 1, w.action(ActionKind.AWAIT)) for w in windows if w.awaited]
            moves += [(window.arrival, 2, window.action(ActionKind.RELOAD)) for window in windows]
            ordered = [(slot, move) for slot, _, move in sorted(moves, key=itemgetter(0, 1))]
            yield insert(schedule, [(timeline, ordered)])

    return bring_below(schedule, costs, bounds, single_ranks(schedule), propose)


def _offload_for_free(schedule: Schedule, costs: Costs) -> Schedule:
    """Offload as much as the step's length allows: bisect the smallest share of each rank's peak
    that offloading can keep without a longer step.
    """
    longest = _FREE * costs.timeline(schedule).step_time
    peaks = peak_memory(schedule, costs.memory)
    best, low, high = schedule, 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        candidate = offloaded(schedule, costs, [share * peak for peak in peaks])
        if costs.timeline(candidate).step_time <= longest:
            best, high = candidate, share
        else:
            low = share
    return best
