"""The schedule of each step, by the step's number of microbatches."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from autosplit.errors import BatchError, PipelineError, ScheduleError
from autosplit.pipeline.engine.stage_set import MicrobatchSizes
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.trainer.list_orders import ListOrders
from autosplit.trainer.options import TrainerOptions
from autosplit.trainer.tuning import Tuner


class StepOrders:
    """The schedules of a trainer's steps, one for each number of microbatches. With ``"auto"``,
    lists of microbatches of different sizes get orders of their own.

    Args:
        options: the trainer's options.
        schedule: the schedule for M microbatches.

    Attributes:
        lists: finds the schedules of lists; None without ``"auto"``.
    """

    def __init__(self, options: TrainerOptions, schedule: Schedule) -> None:
        self._options, self._schedule = options, schedule
        self._by_count: dict[int, Schedule] = {}
        self._offered: Sequence[MicrobatchSizes] = ()
        self._largest: Sequence[MicrobatchSizes] = ()
        self.lists = ListOrders(schedule) if options.schedule.searches else None

    @property
    def schedule(self) -> Schedule:
        """The schedule for M microbatches; a search may replace it."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._by_count = {}

    def check_steps(self, steps: Sequence[Sequence[MicrobatchSizes]]) -> None:
        """Check that every pipeline has a schedule for its microbatches.

        All ranks call it with the same sizes.

        Raises:
            BatchError: a pipeline has no schedule, or a microbatch may exceed the memory limit.
        """
        for microbatches in steps:
            # Without a limit, there is an order for every list.
            if self.lists is None or self._options.memory_limit is not None:
                self.schedule_for(microbatches)
            for number, sizes in enumerate(microbatches):
                if self._largest and not any(map(sizes.fits_within, self._largest)):
                    raise BatchError(
                        f"microbatch {number} has the sizes {sizes.inputs}, and memory_limit has "
                        f"chosen the schedule for at most {self._largest[0].inputs}: pass the "
                        "largest microbatches in the first step, or build a new trainer"
                    )
        self._offered = [max(row, key=attrgetter("elements")) for row in steps]

    def use_search(self, tuner: Tuner) -> None:
        """Find orders of lists for the times that the tuner has measured, and within its limits."""
        if self.lists is not None and tuner.terms:
            self.lists.use_times(tuner.terms)
        if self.lists is not None and tuner.caps:
            self.lists.use_limit(tuner.caps, tuner.memory, self._largest[-1].elements)

    def keep_limit(self) -> None:
        """From now on, refuse microbatches that are larger than those that were checked last. The
        caller searches a schedule within the memory limit for the checked ones.
        """
        self._largest = self._offered

    def schedule_for(self, microbatches: Sequence[MicrobatchSizes]) -> Schedule:
        """Return the schedule of a step, the same on all ranks, without communication.

        Raises:
            BatchError: the schedule does not exist for this number of microbatches.
        """
        elements, count = [sizes.elements for sizes in microbatches], len(microbatches)
        is_usual = count == self.schedule.microbatches and len({*elements}) == 1
        if self.lists is not None and not is_usual:
            with contextlib.suppress(ScheduleError):  # a limit; the schedule may offload
                return self.lists.find(elements)
        if count == self.schedule.microbatches:
            return self.schedule
        if count not in self._by_count:
            is_searched = self._options.tunes and count < self.schedule.microbatches
            build = self._shortened if is_searched else self._build
            self._by_count[count] = build(count)
        return self._by_count[count]

    def _shortened(self, count: int) -> Schedule:
        """The schedule without its last microbatches. The shorter schedule needs no more memory."""
        rows = [
            tuple([action for action in row if action.microbatch < count])
            for row in self.schedule.ranks
        ]
        return replace(self.schedule, microbatches=count, ranks=tuple(rows))

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
        if self._options.memory_limit is not None:
            raise BatchError(
                f"{text}, and memory_limit has chosen a schedule for {wanted.microbatches}: pass "
                f"fewer microbatches, or build a trainer with microbatches={count}"
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
