"""The gradients of one step, kept apart from those of the steps before it while they are scaled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


class StepGradients:
    """What the stages of one rank add to ``.grad`` in one step of a schedule that divides its
    gradients by the number of microbatches: only they are divided, not what was there before, and
    those of a parameter that several stages share once.
    """

    def __init__(self) -> None:
        self._users: Counter[int] = Counter()
        self._earlier: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Put gradients of earlier steps aside; called for each stage before any of them adds."""
        self._users.update(map(id, parameters))
        for parameter in parameters:
            earlier = parameter.grad
            if earlier is not None and id(parameter) not in self._earlier:
                self._earlier[id(parameter)] = parameter, earlier
                parameter.grad = None

    def scale(self, parameters: Sequence[Tensor], factor: int) -> None:
        """Divide what this step added to parameters that no other stage adds to any more, and add
        it to what was there before.
        """
        for parameter in parameters:
            key = id(parameter)
            self._users[key] -= 1
            if self._users[key] <= 0:
                self._finish(parameter, self._earlier.pop(key, None), factor)

    def _finish(self, parameter: Tensor, aside: tuple[Tensor, Tensor] | None, factor: int) -> None:
        grad = parameter.grad
        if aside is None or grad is None or not _is_exact(grad, factor):
            if grad is not None:
                grad.div_(factor)
            if aside is not None:
                _put_back(*aside)
            return
        # Both in one pass over memory, where a product rounds as little as the quotient.
        parameter.grad = aside[1].add_(grad, alpha=1 / factor)

    def abandon(self) -> None:
        """End a step that did not come to its end: put back what was aside, unless all gradients
        were set to None since.
        """
        aside, self._earlier = list(self._earlier.values()), {}
        if any(parameter.grad is not None for parameter, _ in aside):
            for parameter, earlier in aside:
                _put_back(parameter, earlier)
        self._users.clear()


def _is_exact(grad: Tensor, factor: int) -> bool:
    """Whether the reciprocal of a divisor divides as it does. The smallest numbers of float16 are
    not small enough for that.
    """
    return factor & (factor - 1) == 0 and grad.dtype is not torch.float16 and not grad.is_sparse


def _put_back(parameter: Tensor, earlier: Tensor) -> None:
    parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
