"""Records when a rank ran which action, in seconds of ``time.perf_counter``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch

from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.simulation.timeline import Span

T = TypeVar("T")


class Recorder(Protocol):
    """Records one step at a time."""

    def begin(self) -> None:
        """Start a step."""
        ...

    def run(self, action: Action, compute: Callable[[], T]) -> T:
        """Compute, and note when that was."""
        ...

    def note(self, spans: Iterable[Span]) -> None:
        """Add what ran beside computation."""
        ...

    def spans(self) -> list[Span]:
        """What the step ran, in the order in which it began; the device must be done with it."""
        ...


def recorder_on(rank: int, device: torch.device) -> Recorder:
    """The recorder of a rank whose stages are on ``device``."""
    return DeviceRecorder(rank, device) if device.type == "cuda" else HostRecorder(rank)


class HostRecorder:
    """For stages whose calls return when the work is done."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._spans: list[Span] = []

    def begin(self) -> None:
        self._spans = []

    def run(self, action: Action, compute: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = compute()
        self._spans.append(Span(self._rank, action, start, time.perf_counter()))
        return result

    def note(self, spans: Iterable[Span]) -> None:
        self._spans = sorted([*self._spans, *spans], key=lambda span: span.start)

    def spans(self) -> list[Span]:
        return self._spans


class DeviceRecorder:
    """For stages whose calls only enqueue kernels on a GPU: by events between them.

    In a step nobody may wait for the whole device, for a receive that was posted ahead stands
    there until another rank has what this one has yet to send. And a wait at every action would
    measure the gaps that it makes.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._noted: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        self._noted = []
        self._beside: list[Span] = []
        self._origin = self._event()
        self._origin.synchronize()
        self._started = time.perf_counter()

    def run(self, action: Action, compute: Callable[[], T]) -> T:
        start = self._event()
        result = compute()
        self._noted.append((action, start, self._event()))
        return result

    def note(self, spans: Iterable[Span]) -> None:
        self._beside += spans

    def spans(self) -> list[Span]:
        computed = [
            Span(self._rank, action, self._seconds(start), self._seconds(end))
            for action, start, end in self._noted
        ]
        return sorted([*computed, *self._beside], key=lambda span: span.start)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, event: torch.cuda.Event) -> float:
        milliseconds: float = self._origin.elapsed_time(event)
        return self._started + milliseconds / 1000.0
