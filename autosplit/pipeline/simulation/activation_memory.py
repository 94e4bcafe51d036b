"""What a rank keeps of its microbatches while it runs its part of a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule

from .timeline import Timeline

ROUNDING = 1 + 1e-9
"""Of a cap: by so much sums of what is kept may exceed it."""


@dataclass(frozen=True)
class StageMemory:
    """What one stage keeps of one microbatch, in bytes or any common unit.

    Attributes:
        saved: from F to the backward.
        deferred: from I to W.

    Raises:
        ScheduleError: a number that is negative or not finite.
    """

    saved: float
    deferred: float

    def __post_init__(self) -> None:
        for what, size in (("saved", self.saved), ("deferred", self.deferred)):
            if not (math.isfinite(size) and size >= 0.0):
                raise ScheduleError(f"{what} must be a finite number >= 0, got {size!r}")

    def before(self, kind: ActionKind) -> float:
        """How much more there is as soon as an action starts."""
        if kind is ActionKind.FORWARD:
            return self.saved
        if kind is ActionKind.BACKWARD_INPUT:
            return max(self.deferred - self.saved, 0.0)
        return 0.0

    def after(self, kind: ActionKind) -> float:
        """How much less there is once it has ended."""
        if kind is ActionKind.BACKWARD_INPUT:
            return max(self.saved - self.deferred, 0.0)
        if kind is ActionKind.BACKWARD_WEIGHT:
            return self.deferred
        return self.saved if kind is ActionKind.BACKWARD else 0.0


def peak_of(row: Sequence[Action], sizes: Sequence[StageMemory]) -> float:
    """The most that a rank with these actions keeps at once; ``sizes`` by stage."""
    now = most = 0.0
    for action in row:
        size = sizes[action.stage]
        now += size.before(action.kind)
        most = max(most, now)
        now -= size.after(action.kind)
    return most


def peak_memory(schedule: Schedule, sizes: Sequence[StageMemory]) -> list[float]:
    """Per rank, the most it keeps at once: a matter of order, not of time.

    Raises:
        ScheduleError: not one size for each stage.
    """
    _check_count(schedule.stages, sizes)
    return [peak_of(row, sizes) for row in schedule.ranks]


def memory_over_time(
    timeline: Timeline, sizes: Sequence[StageMemory], rank: int
) -> list[tuple[float, float]]:
    """What ``rank`` keeps from each second of one step's timeline on, whenever that changes.

    A W that ran in slices lets go with the last of them: what each slice frees is not known. So do
    several W that ran in one call, at its end.
    """
    steps: list[tuple[float, float]] = [(0.0, 0.0)]
    now = 0.0
    spans = sorted(
        (span for span in timeline.spans if span.rank == rank), key=lambda span: span.start
    )
    _check_count(1 + max((span.action.stage for span in spans), default=-1), sizes, least=True)
    last = {span.action: place for place, span in enumerate(spans)}
    for place, span in enumerate(spans):
        size, kind = sizes[span.action.stage], span.action.kind
        count = len(span.action.microbatches)
        freed = count * size.after(kind) if last[span.action] == place else 0.0
        for when, change in ((span.start, size.before(kind)), (span.end, -freed)):
            if change:
                now += change
                steps.append((when, now))
    return steps


def _check_count(stages: int, sizes: Sequence[StageMemory], *, least: bool = False) -> None:
    if len(sizes) < stages or (not least and len(sizes) > stages):
        raise ScheduleError(
            f"expected the memory of each of {stages} stages, got that of {len(sizes)}"
        )
