"""Records what a rank holds during a step: how much from the allocator, whose from its holders."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from autosplit.pipeline.engine.timing import Recorder
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.simulation.timeline import Span
from autosplit.torch_internals.allocations import Stretch, allocations_on
from autosplit.torch_internals.state import distinct_storage_bytes

from .bands import FIXED, OWNERS, Band
from .bytes_by_owner import BytesByOwner

T = TypeVar("T")


@dataclass(frozen=True)
class _Moment:
    when: float
    during: str  # what begins here
    held: dict[str, int]
    beside: int  # the most since the moment before, above what there was then


class MemoryRecorder:
    """A recorder of times that records memory as well; for one step.

    Args:
        times: records when what ran.
        holdings: who holds what at a moment.
        device: where the stages run. On an accelerator the peak statistics of its allocator are
            reset at every action.
        beside: tells the most bytes that other threads had more, at any time since it was last
            asked, than there were then; None where there are none. Moves allocate and release
            tensors in threads of their own, which on the CPU is not seen in this one: what there
            is at a mark then counts as its holders say, and only what comes and goes behind it as
            the allocator and ``beside`` do.
    """

    def __init__(
        self,
        times: Recorder,
        holdings: BytesByOwner,
        device: torch.device,
        *,
        beside: Callable[[], int] | None = None,
    ) -> None:
        self._beside = beside if device.type == "cpu" else None
        self._times = times
        self._holdings = holdings
        self._allocations = allocations_on(device)
        self._moments: list[_Moment] = []
        self._first = 0
        self._results = 0
        self._stretches: list[Stretch] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around the step, and whatever may be run again of it."""
        with self._allocations:
            yield
        self._stretches = self._allocations.stretches()[self._first :]

    def begin(self) -> None:
        self._moments = []  # before the first of them is marked
        self._first = self._mark("")
        self._times.begin()

    def run(self, action: Action, compute: Callable[[], T]) -> T:
        self._mark(str(action))
        result = self._times.run(action, compute)
        self._mark("")
        return result

    def note(self, spans: Iterable[Span]) -> None:
        """Add what ran beside computation."""
        self._times.note(spans)

    def finish(self, results: Iterable[Tensor]) -> None:
        """The step is over; ``results`` of it are with the caller and nobody's burden."""
        self._results = distinct_storage_bytes(results)
        self._mark("")

    def spans(self) -> list[Span]:
        return self._times.spans()

    def bands(self) -> list[Band]:
        """What was held in the step, from the instant before it to the one after it."""
        moments, stretches = self._moments, self._stretches
        bases = [sum(moments[0].held.values())] * len(moments)
        if self._beside is not None:
            before = [0, *(stretch.end for stretch in stretches)]
            bases = [
                sum(moment.held.values()) - level
                for moment, level in zip(moments, before, strict=False)
            ]
        found = [_instant(moments[0], bases[0])]
        for here, there, stretch, base in zip(moments, moments[1:], stretches, bases, strict=False):
            found.append(_between(here, there, base + stretch.highest + there.beside))
        end = stretches[len(moments) - 2].end  # behind the last mark is not the step's
        results = 0 if self._beside is not None else self._results
        found.append(_instant(moments[-1], bases[-1] + end - results))
        return found

    def _mark(self, during: str) -> int:
        # First what was there until now: what comes in between is rather counted twice than never.
        beside = 0 if self._beside is None else self._beside()
        held = self._holdings.now()
        self._moments.append(_Moment(time.perf_counter(), during, held, beside))
        return self._allocations.mark()


def _instant(moment: _Moment, level: int) -> Band:
    return Band(moment.when, moment.when, "", _with_working(moment.held, level))


def _between(here: _Moment, there: _Moment, level: int) -> Band:
    """Whatever comes or goes in between is nobody's for all of it, but gradients stay."""
    held = {
        owner: (max if owner in FIXED else min)(here.held[owner], there.held[owner])
        for owner in OWNERS
    }
    return Band(here.when, there.when, here.during, _with_working(held, level))


def _with_working(held: dict[str, int], level: int) -> dict[str, int]:
    known = sum(size for owner, size in held.items() if owner != "working")
    return held | {"working": max(level - known, 0)}
