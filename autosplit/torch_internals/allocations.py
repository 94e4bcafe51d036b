"""Record allocations and releases of tensor memory, and the peaks between marks in a program."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
from torch.autograd import profiler
from torch.profiler import DeviceType

from autosplit.errors import AutosplitError

_MARK = "autosplit allocations"


class Stretch(NamedTuple):
    """Allocated memory between one mark and the next, in bytes above the memory at the first mark.

    Attributes:
        highest: the peak, in bytes.
        end: the memory at the end, in bytes; negative if more was released than allocated.
    """

    highest: int
    end: int


profiler_is_enabled = torch._C._autograd._profiler_enabled
"""Whether torch's profiler records this thread."""


def can_count(device: torch.device) -> bool:
    """Whether allocations can be counted now. On the CPU they cannot while a profiler runs."""
    return device.type != "cpu" or not profiler_is_enabled()


def allocations_on(device: torch.device) -> HostAllocations | DeviceAllocations:
    """A counter of the allocations on a device."""
    return HostAllocations() if device.type == "cpu" else DeviceAllocations(device)


class HostAllocations:
    """Counts this thread's allocations and releases in torch's CPU allocator.

    torch's profiler reports allocations to the byte, inside operators and compiled kernels too.
    Memory that was allocated before the first mark is not counted, and neither is its release.
    Memory of other threads is not counted either.

    Raises:
        AutosplitError: another profiler is running.
    """

    def __init__(self) -> None:
        self._profiler = profiler.profile(profile_memory=True)
        self._count = 0

    def __enter__(self) -> Self:
        if not can_count(torch.device("cpu")):
            raise AutosplitError(
                "a profiler is running in this process. Memory is recorded with torch's profiler, "
                "which runs only once in a process: end the other profiler first, or record this "
                "step without 'memory'"
            )
        with quiet_stderr():
            self._profiler.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        with quiet_stderr():
            self._profiler.__exit__(*raised)

    def mark(self) -> int:
        """Begin another stretch and return its number, from 0."""
        with profiler.record_function(_MARK):
            self._count += 1
        return self._count - 1

    def stretches(self) -> list[Stretch]:
        """The stretch after each mark, once the context has ended.

        Changes before the first mark are ignored.
        """
        changes: list[tuple[int, int | None]] = []  # time in ns, and bytes or None for a mark
        results: Any = self._profiler.kineto_results
        for event in () if results is None else results.events():
            if event.name() == _MARK:
                changes.append((event.start_ns(), None))
            elif event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
                changes.append((event.start_ns(), event.nbytes()))
        changes.sort(key=lambda change: (change[0], change[1] is not None))
        stretches: list[Stretch] = []
        for _, size in changes:
            if size is None:
                level = stretches[-1].end if stretches else 0
                stretches.append(Stretch(level, level))
            elif stretches:
                level = stretches[-1].end + size
                stretches[-1] = Stretch(max(stretches[-1].highest, level), level)
        return stretches


class DeviceAllocations:
    """Counts allocations by the statistics of an accelerator's allocator. It resets the allocator's
    peaks.

    An allocation counts at the host's call of the allocator, not when the device uses the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0
        self._stretches: list[Stretch] = []
        self._marks = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._close()

    def mark(self) -> int:
        """Begin another stretch and return its number, as ``HostAllocations.mark`` does."""
        if self._marks:
            self._close()
        else:
            self._base = torch.accelerator.memory_allocated(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._marks += 1
        return self._marks - 1

    def stretches(self) -> list[Stretch]:
        """The stretch after each mark, as ``HostAllocations.stretches`` has them."""
        return self._stretches

    def _close(self) -> None:
        highest = torch.accelerator.max_memory_allocated(self._device) - self._base
        end = torch.accelerator.memory_allocated(self._device) - self._base
        self._stretches.append(Stretch(highest, end))


@contextlib.contextmanager
def record_sizes() -> Iterator[None]:
    """Context that records the sizes of this thread's CPU allocations for releases by another
    thread.

    The counting thread sees the size of a release only if the allocating thread has a profiler.
    """
    config = torch._C._profiler.ProfilerConfig(
        torch._C._profiler.ProfilerState.CPU,
        False,  # shapes
        True,  # memory
        False,  # stacks
        False,  # FLOPs
        False,  # modules
        torch._C._profiler._ExperimentalConfig(),
    )
    torch._C._autograd._enable_profiler_legacy(config)
    try:
        yield
    finally:
        torch._C._autograd._disable_profiler_legacy()


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Silence file descriptor 2, to which the profiler prints when it starts and stops."""
    saved = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
