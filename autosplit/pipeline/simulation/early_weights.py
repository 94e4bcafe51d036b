"""Weight gradients, whole or in slices, that run in every wait: ``early_weights``.

Nobody waits for a W, so what a rank fills a wait with never changes when the wait ends: the fill is
known as soon as the arrival is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autosplit.errors import ScheduleError

from .step_graph import Seconds

Slices = int | Mapping[int, Sequence[float]]
"""Into how many equal parts each W is cut; or, by stage, the seconds of each slice of its W.

A stage that is not there has its W in one.
"""


class EarlyWeights:
    """The Ws of a rank that runs them in every wait, in their order.

    Args:
        row: the numbers of the rank's actions in order.
        seconds: per action, how long it takes; W, nothing.
        slices: per action, the seconds of each slice of a W; none for other actions.
        inputs: of every W, the number of its own I, or -1.

    Attributes:
        spans: number, start and end of all that ran, in order; a slice has its own.
    """

    def __init__(
        self,
        row: Sequence[int],
        seconds: Seconds,
        slices: Sequence[Sequence[float]],
        inputs: Sequence[int],
    ) -> None:
        self.spans: list[tuple[int, float, float]] = []
        self._seconds = seconds
        self._slices = slices
        self._inputs = inputs
        self._left = [(action, part) for action in row for part in slices[action]]
        self._left.reverse()

    def fill(self, action: int, now: float, until: float, starts: list[float]) -> float:
        """When ``action`` can start: behind what is left of it, if it is a W, or behind the slices
        that run from ``now`` on while it waits ``until`` then. ``starts`` are those of all actions.
        """
        left = self._left
        if self._slices[action]:
            while left and left[-1][0] == action:
                now = self._run(now, starts)
            return now
        while now < until and left and self._can_run(left[-1][0], starts):
            now = self._run(now, starts)
        now = max(now, until)
        self.spans.append((action, now, now + self._seconds[action]))
        return now

    def _can_run(self, weight: int, starts: list[float]) -> bool:
        inputs = self._inputs[weight]
        return inputs >= 0 and starts[inputs] >= 0.0

    def _run(self, now: float, starts: list[float]) -> float:
        weight, seconds = self._left.pop()
        if starts[weight] < 0.0:
            starts[weight] = now
        self.spans.append((weight, now, now + seconds))
        return now + seconds


def cutter(slices: Slices) -> Callable[[int, float], Sequence[float]]:
    """The seconds of each slice of a W, from its stage and the seconds of the whole.

    Raises:
        ScheduleError: slices that cannot be.
    """
    if isinstance(slices, int):
        if slices < 1:
            raise ScheduleError(f"slices is a count, 1 or more; got {slices}")
        return lambda stage, whole: [whole / slices] * slices
    for stage, parts in slices.items():
        if not parts or not all(math.isfinite(part) and part >= 0.0 for part in parts):
            raise ScheduleError(
                f"expected the seconds of each slice of a W of stage {stage}, one or more finite "
                f"numbers >= 0, got {parts!r}"
            )
    return lambda stage, whole: slices.get(stage) or [whole]
