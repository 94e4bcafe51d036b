"""Times F, I and W of a stage."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autosplit.stage import Stage
from autosplit.text.figures import spread

_WARMUP = 2
_LEAST = 3
_MORE = 8  # by this part more rounds than at the last look, the error is looked at again
_ENOUGH = 0.01  # error of the sum of all medians, as a share of it, at which more adds nothing


@dataclass
class Rounds:
    """Seconds of each call, round by round; ``backward`` is I and W in one."""

    forward: list[float] = field(default_factory=list)
    backward_input: list[float] = field(default_factory=list)
    backward_weight: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)


def time_stages(
    subjects: Sequence[tuple[Stage, list[Tensor]]],
    seconds: float,
    progress: Callable[[float], object] = lambda seconds: None,
) -> list[Rounds]:
    """Run microbatches through some stages until their times are known.

    All run F, then all I from the last to the first, then all W, as if they were one stage, and
    another microbatch is always under way: what F saved is then out of the cache when the backward
    reads it, and memory is found where others left it. If all of it were freed now and then, the
    allocator would give it back to the system and get it anew, page by page, which may take as
    long as what is computed. In turns, what else the machine does meanwhile meets them all alike.
    Gradients add up over the rounds as over the microbatches of a step.

    Args:
        subjects: stages and their inputs.
        seconds: when to stop at the latest, if each has run a few times.
        progress: told how many seconds have gone by since it was last told.
    """
    clocks = [_Clock(stage, inputs) for stage, inputs in subjects]
    for clock in clocks:
        clock.forward()
    for _ in range(_WARMUP):
        _round(clocks)
    for clock in clocks:
        clock.rounds = Rounds()
    start = last = time.perf_counter()
    looked = 0
    for number in itertools.count(1):
        _round(clocks)
        progress(time.perf_counter() - last)
        last = time.perf_counter()
        if number < _LEAST:
            continue
        if last - start > seconds:
            break
        # Each look goes through all that was measured; for short calls that would take longest.
        if number >= looked + looked / _MORE:
            if error([clock.rounds for clock in clocks]) < _ENOUGH:
                break
            looked = number
    return [clock.rounds for clock in clocks]


def error(rounds: Sequence[Rounds]) -> float:
    """By what share the sum of the medians of F and B may be off."""
    columns = [values for each in rounds for values in (each.forward, each.backward)]
    return sum(map(median_error, columns)) / sum(map(statistics.median, columns))


def median_error(values: Sequence[float]) -> float:
    """The median of n normal values with interquartile range r errs by about 0.93 r / sqrt(n)."""
    return 0.93 * spread(values) / math.sqrt(len(values))


def _round(clocks: Sequence[_Clock]) -> None:
    """One microbatch split, and one not, each with another one under way."""
    for call in (_Clock.forward, _Clock.backward_input, _Clock.backward_weight):
        for clock in clocks if call is _Clock.forward else reversed(clocks):
            call(clock)
    for clock in clocks:
        clock.forward()
    for clock in reversed(clocks):
        clock.backward()


class _Clock:
    def __init__(self, stage: Stage, inputs: list[Tensor]) -> None:
        self.rounds = Rounds()
        self._stage = stage
        self._started = self._done = 0  # microbatches
        self._inputs = [tensor.detach() for tensor in inputs]
        self._device = inputs[0].device if inputs else torch.device("cpu")

    def forward(self) -> None:
        # What a stage is given has just been computed, and is its own.
        inputs = [tensor.clone() for tensor in self._inputs]
        self._time(self.rounds.forward, lambda: self._stage.forward(self._started, inputs))
        self._started += 1

    def backward_input(self) -> None:
        grads = self._grads()
        self._time(
            self.rounds.backward_input, lambda: self._stage.backward_input(self._done, grads)
        )

    def backward_weight(self) -> None:
        self._time(self.rounds.backward_weight, lambda: self._stage.backward_weight(self._done))
        self._done += 1

    def backward(self) -> None:
        grads = self._grads()
        self._time(self.rounds.backward, lambda: self._stage.backward(self._done, grads))
        self._done += 1

    def _grads(self) -> list[Tensor | None]:
        return [
            torch.ones(shape, dtype=dtype, device=self._device) if wanted else None
            for shape, dtype, wanted in self._stage.output_specs
        ]

    def _time(self, into: list[float], call: Callable[[], object]) -> None:
        self._synchronize()
        start = time.perf_counter()
        call()
        self._synchronize()
        into.append(time.perf_counter() - start)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
