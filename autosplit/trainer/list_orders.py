"""The schedules of ``"auto"`` for lists of microbatches of different sizes.

    sizes of the list, rounded up  ──►  remembered schedule
                                   └►  costs by size  ──►  MicrobatchOrders.find

Before steps are measured, seconds are proportional to size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autosplit.pipeline.schedule.schedule import SPLIT_KINDS, ActionKind, Schedule
from autosplit.pipeline.search.microbatch_order import MicrobatchOrders
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.size_costs import Terms, seconds_of_size
from autosplit.runtime.call_cache import CallCache
from autosplit.trainer.tuning import ListBudget, usual_times

_BITS = 6  # sizes keep so many leading binary digits: they are rounded up by at most 1/32


class ListOrders:
    """Finds the schedules of lists, and remembers them by rounded sizes; equal on all ranks.

    Args:
        schedule: a schedule for equal microbatches. Its placement is kept; without a limit, a rank
            keeps at most the memory of this schedule with all microbatches as large as the largest
            one.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        times = usual_times(schedule.stages)
        self._orders = MicrobatchOrders(schedule.placement, times)
        self._terms = [tuple((0.0, seconds, 0.0) for seconds in row) for row in times]
        self._usual = ListBudget((), (StageMemory(1.0, 1.0),) * schedule.stages)
        self._remembered = CallCache[tuple[ListBudget, tuple[int, ...]], Schedule]()

    def use_times(self, terms: Mapping[tuple[int, ActionKind], Terms]) -> None:
        """Use measured seconds by stage and kind of action from now on. A kind without a
        measurement takes no time.
        """
        self._terms = [
            tuple(terms.get((stage, kind), (0.0, 0.0, 0.0)) for kind in SPLIT_KINDS)
            for stage in range(self._schedule.stages)
        ]
        self._remembered.clear()

    def find(self, elements: Sequence[int], budget: ListBudget | None = None) -> Schedule:
        """Return the schedule of a list; the same object for lists of equal rounded sizes.

        Args:
            elements: the size of each microbatch, as the number of its elements.
            budget: the bytes that the list may keep within a limit; None without a limit.

        Raises:
            ScheduleError: no order keeps the limit.
        """
        key = budget or self._usual, tuple(map(_rounded, elements))
        schedule = self._remembered.get(key)
        if schedule is None:
            (caps, units), sizes = key
            costs = {size: self._costs(size, units) for size in {*sizes}}
            most = caps or peak_memory(self._schedule, costs[max(sizes)].memory)
            new = self._orders.find([costs[size] for size in sizes], most)
            schedule = self._remembered.remember(key, new)
        return schedule

    def _costs(self, size: int, units: Sequence[StageMemory]) -> Costs:
        times = [
            (seconds_of_size(f, size), seconds_of_size(i, size), seconds_of_size(w, size))
            for f, i, w in self._terms
        ]
        memory = [StageMemory(size * m.saved, size * m.deferred) for m in units]
        return Costs(times, memory)


def _rounded(size: int) -> int:
    """The size rounded up to ``_BITS`` leading binary digits; at least 1."""
    unit = 1 << max(size.bit_length() - _BITS, 0)
    return max(-(-size // unit) * unit, 1)
