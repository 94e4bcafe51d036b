"""Simulates weight gradients, whole or in slices, that run in every wait: ``early_weights``.

Nobody waits for a W, so what a rank fills a wait with never changes when the wait ends: the fill is
known as soon as the arrival is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.dependency import result_of
from autosplit.pipeline.schedule.schedule import Schedule

from .arrivals import Arrivals
from .timeline import Span

Slices = int | Mapping[int, Sequence[float]]
"""Into how many equal parts each W is cut; or, by stage, the seconds of each slice of its W.

A stage that is not there has its W in one.
"""


def fill_waits(
    schedule: Schedule, duration: Callable[[Action], float], arrivals: Arrivals, slices: Slices
) -> list[Span]:
    """The spans of a step, each rank's in the order in which it runs them; a slice has its own.

    Args:
        schedule: one that does not deadlock.
        duration: seconds of an action.
        arrivals: of that schedule, with nothing made so far.
        slices: how W's are cut.

    Raises:
        ScheduleError: slices that cannot be.
    """
    cut = cutter(duration, slices)
    rows = [_Row(rank, row, duration, cut) for rank, row in enumerate(schedule.ranks)]
    blocked: dict[Action, list[int]] = {}
    movable = list(range(len(rows)))
    while movable:
        rank = movable.pop()
        for action in rows[rank].left():
            needs = arrivals.needs(action)
            missing = next((need for need in needs if need not in arrivals.made), None)
            if missing is not None:
                blocked.setdefault(missing, []).append(rank)
                break
            ready = max((arrivals.at(need, action.stage, rank) for need in needs), default=0.0)
            result = result_of(action)
            arrivals.add(result, rank, rows[rank].run(action, ready))
            movable += blocked.pop(result, ())
    return [span for row in rows for span in row.spans]


class _Row:
    """One rank: what it has run, and the slices of W's that it has not, in order."""

    def __init__(
        self,
        rank: int,
        actions: Sequence[Action],
        duration: Callable[[Action], float],
        cut: Callable[[Action], Sequence[float]],
    ) -> None:
        self.spans: list[Span] = []
        self._rank = rank
        self._left = deque(actions)
        self._duration = duration
        self._clock = 0.0
        self._inputs: set[tuple[int, int]] = set()  # stage and microbatch of every I that ran
        weights = (each for each in actions if each.kind is ActionKind.BACKWARD_WEIGHT)
        self._weights = deque((weight, seconds) for weight in weights for seconds in cut(weight))

    def left(self) -> Iterator[Action]:
        """The actions from here on; whoever asks for the next has run the one before."""
        while self._left:
            yield self._left[0]

    def run(self, action: Action, ready: float) -> float:
        """Run the next action, whose needs are here at ``ready``; when it has ended."""
        self._left.popleft()
        weights = self._weights
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            while weights and weights[0][0] == action:
                self._add(*weights.popleft())
            return self._clock
        while weights and self._clock < ready and self._can_run(weights[0][0]):
            self._add(*weights.popleft())
        self._clock = max(self._clock, ready)
        self._add(action, self._duration(action))
        if action.kind is ActionKind.BACKWARD_INPUT:
            self._inputs.add((action.stage, action.microbatch))
        return self._clock

    def _can_run(self, weight: Action) -> bool:
        return (weight.stage, weight.microbatch) in self._inputs

    def _add(self, action: Action, seconds: float) -> None:
        start, self._clock = self._clock, self._clock + seconds
        self.spans.append(Span(self._rank, action, start, self._clock))


def cutter(
    duration: Callable[[Action], float], slices: Slices
) -> Callable[[Action], Sequence[float]]:
    """The seconds of each slice of a W.

    Raises:
        ScheduleError: slices that cannot be.
    """
    if isinstance(slices, int):
        if slices < 1:
            raise ScheduleError(f"slices is a count, 1 or more; got {slices}")
        return lambda weight: [duration(weight) / slices] * slices
    for stage, parts in slices.items():
        if not parts or not all(math.isfinite(part) and part >= 0.0 for part in parts):
            raise ScheduleError(
                f"expected the seconds of each slice of a W of stage {stage}, one or more finite "
                f"numbers >= 0, got {parts!r}"
            )
    return lambda weight: slices.get(weight.stage) or [duration(weight)]
