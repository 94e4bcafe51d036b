"""A schedule as it is asked for, by name or as it is, before it is known what its stages take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.validation.validate import validate

from .build import SCHEDULES, prepare, unknown_schedule
from .placement import StageTimes

AUTO = "auto"
"""The name for a schedule that is searched for the times of the stages."""


@dataclass(frozen=True)
class ScheduleRequest:
    """A schedule and its options; ``pipeline.build`` says what each means.

    Attributes:
        schedule: a name, or a schedule that is to be run as it is.
        microbatches: M.
        ranks: processes; None: as many as it has, or can use.
        split_backward: False for full backwards.
        weights: where the weight gradients go.

    Raises:
        ScheduleError: options without effect, or a schedule for another number of ranks.
    """

    schedule: str | Schedule
    microbatches: int
    ranks: int | None = None
    split_backward: bool = True
    weights: str | None = None

    def __post_init__(self) -> None:
        given: object = self.schedule
        if not isinstance(given, Schedule) and given != AUTO:
            if given not in SCHEDULES:
                raise unknown_schedule(given, AUTO)
            return
        if self.weights is not None or not self.split_backward:
            beside = f"schedule={AUTO!r}"
            if isinstance(given, Schedule):
                beside = f"the schedule {given.name!r}, which places every action itself"
            raise ScheduleError(f"weights and split_backward have no effect beside {beside}")
        if isinstance(given, Schedule) and self.ranks not in (None, len(given.ranks)):
            raise ScheduleError(
                f"the schedule {given.name!r} has {len(given.ranks)} ranks, but ranks={self.ranks}"
            )

    @property
    def name(self) -> str:
        """What the schedule is called."""
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name

    def build(self, stages: int, times: Sequence[StageTimes]) -> Schedule:
        """The schedule for ``stages`` stages, which take ``times`` where it heeds them.

        Raises:
            ScheduleError: what ``pipeline.build`` refuses; or a schedule that is there is illegal,
                or for other counts.
        """
        return self.prepare(stages)(times)

    def prepare(self, stages: int) -> Callable[[Sequence[StageTimes]], Schedule]:
        """What builds the schedule for ``stages`` stages, for any times of theirs.

        Raises:
            ScheduleError: see ``build``.
        """
        if isinstance(self.schedule, str):
            heeds = self._heeds_times
            built = prepare(
                self.schedule,
                stages,
                self.microbatches,
                ranks=self.ranks,
                split_backward=self.split_backward,
                weights=self.weights,
                times=(1.0, 1.0, 1.0) if heeds else None,
            )
            return lambda times: built(times if heeds else None)
        there = self.schedule
        self.check_fits(stages)
        validate(there)
        return lambda _: there

    def check_fits(self, stages: int) -> None:
        """Refuse a schedule that is there and is for other counts.

        Raises:
            ScheduleError: says for which.
        """
        given = self.schedule
        if isinstance(given, str):
            return
        has, asked = (given.stages, given.microbatches), (stages, self.microbatches)
        if has != asked:
            raise ScheduleError(
                f"the schedule {given.name!r} is for (stages, microbatches) = {has}, but {asked} "
                "are asked for"
            )

    @property
    def _heeds_times(self) -> bool:
        known = SCHEDULES[self.name].weights if self.name in SCHEDULES else ()
        return self.split_backward and "fill" in known and self.weights in (None, "fill")
