"""Spans by a GPU's clock, with a stand-in for its events."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from autosplit.pipeline.engine.timing import DeviceSpanRecorder, SpanRecorder, recorder_on
from autosplit.pipeline.schedule.schedule import Action

F0, W0 = Action.parse("0F0"), Action.parse("0W0")


class Gpu:
    """Does what it is given later, each piece in a second of its own."""

    def __init__(self) -> None:
        self.queued = 0
        self.waited_for = -1

    def stream(self, device: torch.device) -> Gpu:
        return self

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._at = -1

    def record(self, stream: Gpu) -> None:
        assert stream is self._gpu
        self._at = stream.queued

    def synchronize(self) -> None:
        self._gpu.waited_for = self._at

    def elapsed_time(self, other: Event) -> float:
        return 1000.0 * (other._at - self._at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    result = Gpu()

    def refuse(*_: Any) -> None:
        pytest.fail("a wait for the device while a receive is posted would never end")

    monkeypatch.setattr(torch.cuda, "Event", result.event)
    monkeypatch.setattr(torch.cuda, "current_stream", result.stream)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    return result


def test_spans_are_when_the_device_ran_what_it_was_given(gpu: Gpu) -> None:
    recorder = recorder_on(3, torch.device("cuda"))
    assert isinstance(recorder, DeviceSpanRecorder)

    def compute(pieces: int) -> str:
        gpu.queued += pieces
        return f"{pieces} queued"

    for _ in range(2):
        gpu.queued = 5
        earlier = time.perf_counter()
        recorder.begin()
        after = time.perf_counter()
        assert recorder.run((F0,), lambda: compute(2)) == "2 queued"
        gpu.queued += 4  # waits for a message
        recorder.run((W0,), lambda: compute(1))
    # Nothing was waited for but the start, before any message is under way.
    assert gpu.waited_for == 5
    spans = recorder.spans()
    assert [(span.rank, span.action) for span in spans] == [(3, F0), (3, W0)]
    times = [time for span in spans for time in (span.start, span.end)]
    assert [round(time - times[0], 6) for time in times] == [0, 2, 6, 7]
    assert earlier <= times[0] <= after


def test_the_host_is_clock_enough_for_a_cpu() -> None:
    recorder = recorder_on(0, torch.device("cpu"))
    assert type(recorder) is SpanRecorder
