"""The schedule of each step, by the step's microbatches."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from autosplit.errors import BatchError, PipelineError, ScheduleError
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.trainer.limited_schedules import LimitedSchedules
from autosplit.trainer.list_orders import ListOrders
from autosplit.trainer.step_plans import StepPlan
from autosplit.trainer.trainer_options import TrainerOptions


class StepOrders:
    """The schedules of a trainer's steps, one for each number of microbatches. With ``"auto"``,
    lists of microbatches of different sizes get orders of their own.

    Args:
        options: the trainer's options.
        schedule: the schedule for M microbatches.
        limited: the schedules within the memory limit; None without a limit.
        one_order: whether all pipelines must run their actions in one order, as their ranks gather
            parameters of several stages, or of blocks, together.

    Attributes:
        lists: finds the schedules of lists; None without ``"auto"``, or with ``one_order``.
    """

    def __init__(
        self,
        options: TrainerOptions,
        schedule: Schedule,
        limited: LimitedSchedules | None,
        *,
        one_order: bool,
    ) -> None:
        self._options, self._schedule, self._limited = options, schedule, limited
        self._by_count: dict[tuple[int, int], Schedule] = {}
        finds_orders = options.schedule.searches and not one_order
        self.lists = ListOrders(schedule) if finds_orders else None

    @property
    def schedule(self) -> Schedule:
        """The schedule for M microbatches; a search may replace it."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._by_count = {}

    def check_steps(self, plans: Sequence[StepPlan]) -> Sequence[StepPlan]:
        """Check that every pipeline has a schedule for its microbatches. All ranks call it with the
        same plans.

        Returns:
            The plans, if a schedule within the memory limit must be searched for them; else none.

        Raises:
            BatchError: a pipeline has no schedule.
        """
        if self._limited is not None:
            covered = [self._limited.covering(plan) for plan in plans]
            return plans if None in covered else ()
        if self.lists is None:
            for plan in plans:
                self.schedule_for(plan)
        return ()

    def schedule_for(self, plan: StepPlan) -> Schedule:
        """Return the schedule of a step, the same on all ranks, without communication.

        Raises:
            BatchError: the schedule does not exist for this number of microbatches.
        """
        limited = None if self._limited is None else self._limited.covering(plan)
        usual = self.schedule if limited is None else limited.schedule
        elements, count = [sizes.elements for sizes in plan.microbatches], len(plan.microbatches)
        is_usual = count == usual.microbatches and len({*elements}) == 1
        if self.lists is not None and not is_usual:
            with contextlib.suppress(ScheduleError):  # a limit; the schedule may offload
                return self.lists.find(elements, None if limited is None else limited.budget)
        if count == usual.microbatches:
            return usual
        key = id(usual), count
        if key not in self._by_count:
            is_searched = self._options.tunes and count < usual.microbatches
            self._by_count[key] = _shortened(usual, count) if is_searched else self._build(count)
        return self._by_count[key]

    def _build(self, count: int) -> Schedule:
        """Build the schedule for another number of microbatches."""
        wanted = self._options.schedule
        text = f"the step has {count} microbatches"
        if isinstance(wanted.schedule, Schedule):
            raise BatchError(
                f"{text}, and the trainer's schedule is a Schedule for "
                f"{wanted.schedule.microbatches}: pass as many microbatches, or "
                "build the trainer with the name of a schedule"
            )
        options = replace(self._options, schedule=replace(wanted, microbatches=count))
        try:
            built = options.schedule_for(self.schedule.stages, len(self.schedule.ranks))
        except (PipelineError, ScheduleError) as error:
            raise BatchError(f"{text}: {error}") from error
        if built.placement != self.schedule.placement:
            raise BatchError(
                f"{text}, for which {built.name!r} would place stages on other ranks: pass another "
                "number of microbatches"
            )
        return built


def _shortened(schedule: Schedule, count: int) -> Schedule:
    """A schedule without its last microbatches, which needs no more memory."""
    rows = [
        tuple([action for action in row if action.microbatch < count]) for row in schedule.ranks
    ]
    return replace(schedule, microbatches=count, ranks=tuple(rows))
