"""When the weight gradients of a stage, or of a slice of its W, are all there in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from .action_order import Step, Values

Deliver = Callable[[Values], None]
Finished = Callable[[int, int], None]
"""Is told a stage and the number of a slice; a stage without slices has slice 0."""


class WeightCompletions:
    """Counts what adds to each slice's weight gradients, step by step.

    Args:
        finished: hears of each slice when its last gradients are there; None: nobody does.

    Attributes:
        order: stages and slices as they are finished, if steps run in the order of ``counted``.
    """

    def __init__(self, finished: Finished | None) -> None:
        self._finished = finished
        self._parts: Counter[tuple[int, int]] = Counter()
        self._left: Counter[tuple[int, int]] = Counter()
        self.order: tuple[tuple[int, int], ...] = ()

    def begin(self) -> None:
        """Start a step."""
        self._left = self._parts.copy()

    def counted(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """The steps of a row, each with the news of what it finishes."""
        added = [(step.action.stage, part) for step in steps for part in step.adds]
        self._parts = Counter(added)
        self.order = tuple(reversed(dict.fromkeys(reversed(added))))
        return tuple(
            # Those with calls of their own count these.
            replace(step, deliver=self.counting(step.action.stage, step.adds, step.deliver))
            if step.adds and step.calls is None
            else step
            for step in steps
        )

    def counting(self, stage: int, parts: Sequence[int], deliver: Deliver) -> Deliver:
        """``deliver``, and the news that slices of a stage are finished when nothing is left."""
        finished = self._finished
        if finished is None:
            return deliver

        def counted(values: Values) -> None:
            deliver(values)
            for part in parts:
                self._left[stage, part] -= 1
                if not self._left[stage, part]:
                    finished(stage, part)

        return counted
