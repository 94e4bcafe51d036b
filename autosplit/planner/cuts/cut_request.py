"""What a model is to be cut into, and the best cuts for given costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.planner.costs.block_costs import ModelCosts
from autosplit.planner.costs.limits import Limits

from .rank_measurement import agreed
from .solve import CapError, Solution, solve, weigh
from .within_limit import within_limit


@dataclass(frozen=True)
class CutRequest:
    """What a model is to be cut into, before it is known what its blocks cost.

    Attributes:
        stages: how many.
        firsts: the first blocks of all stages but the first; None: where the step is shortest.
        schedule: what they are to run.
        limits: memory of a rank and links.
    """

    stages: int
    firsts: Sequence[int] | None
    schedule: ScheduleRequest
    limits: Limits

    @property
    def alone(self) -> bool:
        """Whether this process plans for itself, whatever group it is in."""
        return self.schedule.ranks == 1

    def best(self, costs: ModelCosts) -> Solution:
        """The best stages for ``costs``, the same on all ranks.

        Raises:
            CapError: nothing fits; says the least cap that would do.
            ScheduleError: an unknown schedule, or one that refuses the counts.
        """
        return self._find(costs) if self.alone else agreed(lambda: self._find(costs))

    def nearest(self, costs: ModelCosts) -> Solution:
        """As ``best``; where nothing keeps the limit of memory, the best without one."""
        try:
            return self.best(costs)
        except CapError:
            return replace(self, limits=replace(self.limits, cap=math.inf)).best(costs)

    def _find(self, costs: ModelCosts) -> Solution:
        if self.limits.measures:
            try:
                return self._find_by_order(costs, self.limits)
            except CapError:
                found = self._find_by_order(costs, replace(self.limits, cap=math.inf))
                return within_limit(found, self.limits)
        return self._find_by_order(costs, self.limits)

    def _find_by_order(self, costs: ModelCosts, limits: Limits) -> Solution:
        """With what the schedule holds, and no measures."""
        if self.firsts is None:
            return solve(costs, self.stages, self.schedule, limits=limits)
        cuts = [first - 1 for first in self.firsts]
        return _fitting(weigh(costs, cuts, self.schedule, limits), limits)


def _fitting(found: Solution, limits: Limits) -> Solution:
    least = max(found.peaks)
    if least > limits.cap * (1 + 1e-9):
        raise CapError(
            f"the stages that cut_at gives do not fit under a cap of {limits.cap:,.0f} bytes a "
            f"rank; the least cap for them is {least:,.0f}: raise the cap, cut elsewhere, or leave "
            "cut_at out",
            least,
        )
    return found
