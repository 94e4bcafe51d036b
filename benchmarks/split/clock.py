"""Durations of actions, interleaved: A B A B, medians, and ratios within a round."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autosplit.text.figures import quartiles

from ..results import ratios
from .contenders import ACTIONS, Contender, microbatch
from .models import Subject

WARMUP = 3


@dataclasses.dataclass(frozen=True)
class Durations:
    """Milliseconds of one contender, a value a round.

    Attributes:
        actions: action -> durations.
    """

    actions: Mapping[str, list[float]]

    @property
    def step(self) -> list[float]:
        return [sum(each) for each in zip(*self.actions.values(), strict=True)]

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(each) for name, each in self.actions.items()}


def interleave(
    contenders: Mapping[str, Contender], subject: Subject, rounds: int
) -> dict[str, Durations]:
    """Run one microbatch of each in turn, ``rounds`` times, after a warm-up.

    Garbage is collected between microbatches and not inside: cycles that one contender
    leaves behind are not the next one's cost.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(WARMUP + rounds):
            for name, contender in contenders.items():
                found[name].append(_durations(contender, subject))
                contender.clear()
                gc.collect()
    finally:
        gc.enable()
        if not frozen:  # else the caller froze objects, which stay so
            gc.unfreeze()
    return {name: _by_action(marks[WARMUP:]) for name, marks in found.items()}


def ratio(mine: Durations, theirs: Durations) -> tuple[float, float]:
    """Median and interquartile range of the rounds' own ratios."""
    low, middle, high = quartiles(ratios(mine.step, theirs.step))
    return middle, high - low


def _durations(contender: Contender, subject: Subject) -> dict[str, float]:
    stamps: list[Any] = []

    @contextlib.contextmanager
    def around(action: str) -> Iterator[None]:
        stamps.append(_stamp(subject.x.device))
        yield

    _settle(subject.x.device)
    microbatch(contender, subject, around)
    stamps.append(_stamp(subject.x.device))
    _settle(subject.x.device)
    pairs = itertools.pairwise(stamps)
    return {name: _between(*pair) for name, pair in zip(ACTIONS, pairs, strict=True)}


def _by_action(rounds: list[dict[str, float]]) -> Durations:
    return Durations({action: [each[action] for each in rounds] for action in ACTIONS})


def _stamp(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _between(first: Any, last: Any) -> float:
    if isinstance(first, float):
        return float(1e3 * (last - first))
    return float(first.elapsed_time(last))
