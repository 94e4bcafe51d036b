"""The most bytes of tensors that one call holds at any time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from autosplit.torch_internals.storage import distinct_storage_bytes


def peak_bytes(call: Callable[[], Any], resident: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of ``resident`` tensors plus the peak of what ``call`` allocates.

    On CUDA the allocator's own peak. On the CPU torch keeps none, so the profiler's record of
    every allocation and release is added up; the call is slower meanwhile, not larger.

    Args:
        call: what to measure; it should release what it allocates.
        resident: tensors that exist throughout (parameters, optimizer state).
        device: where the call runs.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        grown = torch.cuda.max_memory_allocated(device) - before
    else:
        grown = peak(change for _, change in allocations(call))
    return distinct_storage_bytes(resident) + grown


def allocations(call: Callable[[], Any]) -> list[tuple[int, int]]:
    """What ``call`` allocates and releases on the CPU, in order: address and bytes, negative where
    they are released.
    """
    with tempfile.TemporaryDirectory() as folder, _quiet_stderr():
        kinds = [ProfilerActivity.CPU]
        with profile(activities=kinds, profile_memory=True, acc_events=True) as recorded:
            call()
        file = pathlib.Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    return [(int(event["args"]["Addr"]), event["args"]["Bytes"]) for event in changes]


def peak(changes: Iterable[int]) -> int:
    """The most that they add up to."""
    return max(0, *itertools.accumulate(changes, initial=0))


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler prints on the file descriptor itself when it starts and stops."""
    saved = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
