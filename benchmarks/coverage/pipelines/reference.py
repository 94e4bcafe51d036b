"""The lesson in one process, by plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..observe import Observed, seed_everything
from .lesson import Inputs, Lesson, gradients, losses, optimizer, state

SEED = 1


class Draws(TorchDispatchMode):
    """Counts the operators that draw random numbers. With ``first``, the operators of a forward
    from that number on draw from a generator of their own, as those of the second stage do, which
    is on another rank. Both generators start alike.
    """

    def __init__(self, first: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0
        self._first = first
        self._states = [torch.get_rng_state(), torch.get_rng_state()]
        self._current = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            if self._first is not None:
                self._draw_from(int(self.count >= self._first))
            self.count += 1
        return func(*args, **(kwargs or {}))

    def _draw_from(self, generator: int) -> None:
        if generator != self._current:
            self._states[self._current] = torch.get_rng_state()
            torch.set_rng_state(self._states[generator])
            self._current = generator


def count_draws(forward: Callable[[], Any]) -> int:
    """How many operators of a forward draw random numbers."""
    draws = Draws()
    with draws:
        forward()
    return draws.count


def taught(lesson: Lesson, draws: int, dtype: torch.dtype = torch.float32) -> Observed:
    """What is seen of training the lesson's model, of which a copy is trained.

    Args:
        lesson: what to train.
        draws: how many operators of a forward draw random numbers on the first rank.
        dtype: in which precision.
    """
    model = copy.deepcopy(lesson.model).to(dtype)
    moves = optimizer(model.parameters())
    seen: Observed = {}
    seed_everything(SEED)
    generators = Draws(draws)
    for step, microbatches in enumerate(lesson.microbatches):
        values = []
        for inputs in microbatches:
            generators.count = 0
            with generators:
                loss = _loss(lesson, model, inputs, dtype)
            (loss / len(microbatches)).backward()
            values.append(loss)
        seen |= losses(values, step) | gradients(model, step)
        moves.step()
        moves.zero_grad()
        seen |= state(model, step)
    return seen


def _loss(lesson: Lesson, model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Tensor:
    return lesson.loss(model(**{name: _wide(value, dtype) for name, value in inputs.items()}))


def _wide(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value
