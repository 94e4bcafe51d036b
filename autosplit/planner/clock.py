"""Times F, I and W of a stage."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autosplit.stage import Stage

_WARMUP = 2
_LEAST = 3
_ENOUGH = 0.01  # standard error of the median, as a share of it, at which more adds nothing


@dataclass
class Rounds:
    """Seconds of each call, round by round; ``backward`` is I and W in one."""

    forward: list[float] = field(default_factory=list)
    backward_input: list[float] = field(default_factory=list)
    backward_weight: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def enough(self, late: bool) -> bool:
        """Whether the medians would hardly move with more rounds, or it is ``late``."""
        if len(self.backward) < _LEAST:
            return False
        return late or all(map(_settled, (self.forward, self.backward)))


def run(
    subjects: Sequence[tuple[Stage, list[Tensor]]],
    seconds: float,
    progress: Callable[[float], object] = lambda seconds: None,
) -> list[Rounds]:
    """Run microbatches through some stages in turn until their times are known.

    In turn, so that what else the machine does meanwhile meets them all alike. Gradients add up
    over the rounds as over the microbatches of a step.

    Args:
        subjects: stages and their inputs.
        seconds: when to stop at the latest, if each has run a few times.
        progress: told how many seconds have gone by since it was last told.
    """
    clocks = [_Clock(stage, inputs) for stage, inputs in subjects]
    for clock in clocks * _WARMUP:
        clock.round()
    for clock in clocks:
        clock.rounds = Rounds()
    start = last = time.perf_counter()
    left = clocks
    while left:
        for clock in left:
            clock.round()
            progress(time.perf_counter() - last)
            last = time.perf_counter()
        late = last - start > seconds
        left = [each for each in left if not each.rounds.enough(late)]
    return [clock.rounds for clock in clocks]


class _Clock:
    def __init__(self, stage: Stage, inputs: list[Tensor]) -> None:
        self.rounds = Rounds()
        self._stage = stage
        self._inputs = [tensor.detach() for tensor in inputs]
        self._device = inputs[0].device if inputs else torch.device("cpu")
        self._grads = [
            torch.ones(shape, dtype=dtype, device=self._device) if wanted else None
            for shape, dtype, wanted in stage.output_specs
        ]

    def round(self) -> None:
        """One microbatch split, and one not."""
        stage, rounds = self._stage, self.rounds
        self._time(rounds.forward, lambda: stage.forward(0, [*self._inputs]))
        self._time(rounds.backward_input, lambda: stage.backward_input(0, [*self._grads]))
        self._time(rounds.backward_weight, lambda: stage.backward_weight(0))
        self._time(rounds.forward, lambda: stage.forward(0, [*self._inputs]))
        self._time(rounds.backward, lambda: stage.backward(0, [*self._grads]))

    def _time(self, into: list[float], call: Callable[[], object]) -> None:
        self._synchronize()
        start = time.perf_counter()
        call()
        self._synchronize()
        into.append(time.perf_counter() - start)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _settled(values: list[float]) -> bool:
    """The median of n normal values with interquartile range r errs by about 0.93 r / sqrt(n)."""
    low, middle, high = statistics.quantiles(values, n=4)
    return 0.93 * (high - low) / math.sqrt(len(values)) < _ENOUGH * middle
