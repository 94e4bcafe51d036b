"""Which stages are wanted, and the best of them for some costs."""

from __future__ import annotations

from collections.abc import Sequence

from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.planner.costs.block_costs import ModelCosts
from autosplit.planner.costs.limits import Limits

from .rank_measurement import agreed
from .schedule_request import form_of
from .solve import CapError, Solution, solve, weigh


class CutRequest:
    """What a model is to be cut into, before it is known what its blocks cost.

    Args:
        stages: how many.
        firsts: the first blocks of all stages but the first; None: where the step is shortest.
        microbatches: M.
        schedule: see ``partition``, as are the next three.
        limits: memory of a rank and links.

    Attributes:
        stages: how many.
        microbatches: M.
        name: of the schedule.
        limits: memory of a rank and links.
        alone: whether this process plans for itself, whatever group it is in.

    Raises:
        ScheduleError: options that a schedule that is there leaves without effect.
    """

    def __init__(
        self,
        stages: int,
        firsts: Sequence[int] | None,
        microbatches: int,
        schedule: str | Schedule,
        *,
        ranks: int | None,
        split_backward: bool,
        weights: str | None,
        limits: Limits,
    ) -> None:
        self.stages = stages
        self.microbatches = microbatches
        self.limits = limits
        self.alone = ranks == 1
        self._firsts = firsts
        self._schedule = schedule
        self._ranks = ranks
        self._split_backward = split_backward
        self._weights = weights
        self._form = form_of(schedule, ranks, split_backward=split_backward, weights=weights)
        self.name = self._form.name

    def best(self, costs: ModelCosts) -> Solution:
        """The best stages for ``costs``, the same on all ranks.

        Raises:
            CapError: nothing fits; says the least cap that would do.
            ScheduleError: an unknown schedule, or one that refuses the counts.
        """
        return self._find(costs) if self.alone else agreed(lambda: self._find(costs))

    def _find(self, costs: ModelCosts) -> Solution:
        limits = self.limits
        if self._firsts is not None:
            cuts = [first - 1 for first in self._firsts]
            return _fitting(weigh(costs, cuts, self.microbatches, self._form, limits), limits)
        return solve(
            costs,
            self.stages,
            self.microbatches,
            self._schedule,
            ranks=self._ranks,
            split_backward=self._split_backward,
            weights=self._weights,
            limits=limits,
        )


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
