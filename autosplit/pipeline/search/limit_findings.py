"""What a search within a limit finds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.timeline import Timeline


@dataclass(frozen=True)
class MeasureEffect:
    """What one measure does beside the others: seconds that the step is longer than without it, and
    by how much each rank's peak is less.
    """

    measure: str
    seconds: float
    saved: tuple[float, ...]


@dataclass(frozen=True)
class WithinMemory:
    """A schedule within a limit, and how it came to be.

    Attributes:
        schedule: named ``"auto"``.
        timeline: its step.
        peaks: per rank, the most that it holds of its microbatches: by the order of its row, so
            whatever transfers take.
        setting: the memory setting of the split that it is for.
        base: the schedule that the measures were taken on.
        effects: per measure, what it did.
        unlimited: seconds of the shortest step that was found without a limit.
        simulated: how many actions the search played to find it.
    """

    schedule: Schedule
    timeline: Timeline
    peaks: tuple[float, ...]
    setting: str | int
    base: str
    effects: tuple[MeasureEffect, ...]
    unlimited: float
    simulated: int = 0


class Fitting(NamedTuple):
    """A schedule that keeps the limit, and what it was made from."""

    step: float
    schedule: Schedule
    timeline: Timeline
    base: str


@dataclass
class Found:
    """What was found with some measures.

    Attributes:
        fitting: by base, the shortest step that keeps the limit.
        nearest: by how much what comes nearest to the limit exceeds it, of which base, and itself.
    """

    fitting: dict[str, Fitting] = field(default_factory=dict)
    nearest: tuple[float, str, Schedule] | None = None

    @property
    def shortest(self) -> float:
        """Seconds; infinite where nothing keeps the limit."""
        return min((each.step for each in self.fitting.values()), default=math.inf)
