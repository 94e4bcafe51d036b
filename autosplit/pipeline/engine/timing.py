"""Recorders of the start and end of actions, in seconds of ``perf_counter``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch

from autosplit.pipeline.schedule.schedule import Action
from autosplit.pipeline.simulation.simulate import Span

T = TypeVar("T")


class SpanRecorder:
    """Records when actions ran, one step at a time, for stages whose calls return when the work is
    done.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._computed: list[tuple[Sequence[Action], Any, Any]] = []
        self._moves: list[Span] = []

    def begin(self) -> None:
        """Start to record a step."""
        self._computed, self._moves = [], []

    def run(self, actions: Sequence[Action], compute: Callable[[], T]) -> T:
        """Run ``compute``, and record its start and end, also if it raises. If ``compute`` runs
        several actions as one, each gets an equal part of the time.
        """
        start = self._mark()
        try:
            result = compute()
        except Exception:
            with contextlib.suppress(RuntimeError):  # of a device that failed
                self._computed.append((actions, start, self._mark()))
            raise
        self._computed.append((actions, start, self._mark()))
        return result

    def note(self, spans: Iterable[Span]) -> None:
        """Add the spans of moves, which ran beside computation."""
        self._moves += spans

    def spans(self) -> list[Span]:
        """The spans of the step by their start. The device must have finished the step."""
        computed = []
        for actions, begin, end in self._computed:
            start = self._seconds(begin)
            part = (self._seconds(end) - start) / len(actions)
            computed += [
                Span(self._rank, action, start + at * part, start + (at + 1) * part)
                for at, action in enumerate(actions)
            ]
        return sorted([*computed, *self._moves], key=lambda span: span.start)

    def _mark(self) -> Any:
        return perf_counter()

    def _seconds(self, mark: Any) -> float:
        return float(mark)


class DeviceSpanRecorder(SpanRecorder):
    """Records by CUDA events, for stages whose calls only enqueue kernels.

    Within a step, a rank must not wait for the whole device. A receive that was posted ahead
    occupies the device until the peer sends, and the peer may wait for a message of this rank.
    Waiting at each action would also cause gaps, which the recorder would measure.
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


def run_in_range(name: str, compute: Callable[[], T]) -> T:
    """Run ``compute`` in a range of torch.profiler, which shows it under this name."""
    with torch.profiler.record_function(name):
        return compute()


def recorder_on(rank: int, device: torch.device) -> SpanRecorder:
    """The recorder of a rank whose stages are on ``device``."""
    return DeviceSpanRecorder(rank, device) if device.type == "cuda" else SpanRecorder(rank)
