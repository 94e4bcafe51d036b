"""The gradients of one step, kept apart from those of the steps before it while they are scaled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor


class StepGradients:
    """What the stages of one rank add to ``.grad`` in one step of a schedule that divides its
    gradients by the number of microbatches: only they are divided, not what was there before, and
    those of a parameter that several stages share once.
    """

    def __init__(self) -> None:
        self._users: Counter[int] = Counter()
        self._earlier: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Put gradients of earlier steps aside; called for each stage before any of them adds."""
        for parameter in parameters:
            self._users[id(parameter)] += 1
            if parameter.grad is not None and id(parameter) not in self._earlier:
                self._earlier[id(parameter)] = parameter, parameter.grad
                parameter.grad = None

    def scale(self, parameters: Iterable[Tensor], factor: int) -> None:
        """Divide what this step added to parameters that no other stage adds to any more, and add
        it to what was there before.
        """
        for parameter in parameters:
            key = id(parameter)
            self._users[key] -= 1
            if self._users[key] > 0:
                continue
            if parameter.grad is not None:
                parameter.grad.div_(factor)
            self._restore(key)

    def abandon(self) -> None:
        """End a step that did not come to its end: put back what was aside, unless all gradients
        were set to None since.
        """
        started = [parameter for parameter, _ in self._earlier.values()]
        if all(parameter.grad is None for parameter in started):
            self._earlier.clear()
        for key in list(self._earlier):
            self._restore(key)
        self._users.clear()

    def _restore(self, key: int) -> None:
        if key not in self._earlier:
            return
        parameter, earlier = self._earlier.pop(key)
        parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
