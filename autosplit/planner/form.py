"""A schedule as a plan asks for it, before it is known what the stages take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule import Schedule
from autosplit.pipeline.schedules import SCHEDULES, build


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
            raise ScheduleError(
                f"{self.name!r} runs two copies of every stage, which no trainer does: take one "
                "with one copy, such as 'zb-v'"
            )
        return replace(built, crosses_step=False)
