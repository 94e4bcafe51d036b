"""A schedule as a plan asks for it: by name, before it is known what the stages take, or itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.validation.validate import validate


@dataclass(frozen=True)
class Form:
    """A named schedule and its options; see ``pipeline.build``."""

    name: str
    ranks: int | None = None
    split_backward: bool = True
    weights: str | None = None

    def build(
        self, stages: int, microbatches: int, times: Sequence[tuple[float, float, float]]
    ) -> Schedule:
        """The schedule, for stages that take ``times`` where it heeds them.

        Ranks wait for each other between steps, as a trainer's do.

        Raises:
            ScheduleError: what ``pipeline.build`` refuses, or two copies of the stages.
        """
        suits = self.name in SCHEDULES and "fill" in SCHEDULES[self.name].weights
        timed = self.split_backward and suits and self.weights in (None, "fill")
        built = build(
            self.name,
            stages,
            microbatches,
            ranks=self.ranks,
            split_backward=self.split_backward,
            weights=self.weights,
            times=times if timed else None,
        )
        if built.mirror is not None:
            raise _two_copies(self.name)
        return replace(built, crosses_step=False)


@dataclass(frozen=True)
class Fixed:
    """A schedule that stays as it is, whatever the stages take."""

    schedule: Schedule

    @property
    def name(self) -> str:
        """What the schedule is called."""
        return self.schedule.name

    def build(
        self, stages: int, microbatches: int, times: Sequence[tuple[float, float, float]]
    ) -> Schedule:
        """The schedule; ranks wait for each other between steps.

        Raises:
            ScheduleError: it is for other counts, illegal, or runs two copies of the stages.
        """
        has = (self.schedule.stages, self.schedule.microbatches)
        if has != (stages, microbatches):
            raise ScheduleError(
                f"the schedule {self.name!r} is for (stages, microbatches) = {has}, but the model "
                f"is to be cut for {(stages, microbatches)}"
            )
        if self.schedule.mirror is not None:
            raise _two_copies(self.name)
        validate(self.schedule)
        return replace(self.schedule, crosses_step=False)


def form_of(
    schedule: str | Schedule,
    ranks: int | None = None,
    *,
    split_backward: bool = True,
    weights: str | None = None,
) -> Form | Fixed:
    """The form of a name or of a schedule that is there already.

    Raises:
        ScheduleError: options that a schedule that is there leaves without effect.
    """
    if isinstance(schedule, str):
        return Form(schedule, ranks, split_backward, weights)
    if weights is not None or not split_backward:
        raise ScheduleError(
            f"weights and split_backward have no effect beside the schedule {schedule.name!r}, "
            "which places every action itself"
        )
    if ranks not in (None, len(schedule.ranks)):
        raise ScheduleError(
            f"the schedule {schedule.name!r} has {len(schedule.ranks)} ranks, but ranks={ranks}"
        )
    return Fixed(schedule)


def _two_copies(name: str) -> ScheduleError:
    return ScheduleError(
        f"{name!r} runs two copies of every stage, for which nothing is planned: partition the "
        "model for another schedule, and give a trainer the result and this one"
    )
