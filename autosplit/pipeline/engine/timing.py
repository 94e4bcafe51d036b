"""How long actions take, in seconds of ``perf_counter``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, TypeVar

import torch

from autosplit.pipeline.schedule.schedule import Action
from autosplit.pipeline.simulation.simulate import Span

T = TypeVar("T")


class Recorder:
    """Records when things ran in one step at a time; for stages whose calls return when the work is
    done.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._noted: list[tuple[Action, Any, Any]] = []
        self._beside: list[Span] = []

    def begin(self) -> None:
        """Start a step."""
        self._noted, self._beside = [], []

    def run(self, action: Action, compute: Callable[[], T]) -> T:
        """Compute, and note when that was."""
        start = self._mark()
        result = compute()
        self._noted.append((action, start, self._mark()))
        return result

    def note(self, spans: Iterable[Span]) -> None:
        """Add what ran beside computation."""
        self._beside += spans

    def spans(self) -> list[Span]:
        """What the step ran, in the order in which it began; the device must be done with it."""
        computed = [
            Span(self._rank, action, self._seconds(start), self._seconds(end))
            for action, start, end in self._noted
        ]
        return sorted([*computed, *self._beside], key=lambda span: span.start)

    def _mark(self) -> Any:
        return perf_counter()

    def _seconds(self, mark: Any) -> float:
        return float(mark)


class DeviceRecorder(Recorder):
    """For stages whose calls only enqueue kernels on a GPU: by events between them.

    In a step nobody may wait for the whole device, for a receive that was posted ahead stands
    there until another rank has what this one has yet to send. And a wait at every action would
    measure the gaps that it makes.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(rank)
        self._device = device

    def begin(self) -> None:
        super().begin()
        self._origin = self._mark()
        self._origin.synchronize()
        self._started = perf_counter()

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, mark: torch.cuda.Event) -> float:
        milliseconds: float = self._origin.elapsed_time(mark)
        return self._started + milliseconds / 1000.0


def recorder_on(rank: int, device: torch.device) -> Recorder:
    """The recorder of a rank whose stages are on ``device``."""
    return DeviceRecorder(rank, device) if device.type == "cuda" else Recorder(rank)
