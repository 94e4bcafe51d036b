"""Offload targets, and the measurement of their speed. A target holds bytes of a rank in host
memory or a file, outside of the memory in which the rank computes.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import tempfile
import weakref
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from autosplit.device import settle
from autosplit.errors import OutputError, PipelineError
from autosplit.mesh.costs import Link


class _FileRange(NamedTuple):
    start: int
    size: int


class OffloadFile:
    """Offload target of stages on the CPU: a file without a name, which disappears with its
    process.

    The file is read and written at offsets, not through a memory mapping. Both use the page cache.
    If the disk is full or the file was truncated, a mapping kills the process (SIGBUS), but a call
    returns an error.

    Args:
        folder: the folder of the file; None: the folder of temporary files.

    Raises:
        OutputError: no file can be created in the folder.
    """

    device = torch.device("cpu")

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="autosplit-") as file:
                self._file = os.dup(file.fileno())
        except OSError as error:
            raise OutputError(
                f"no file for offloaded tensors can be created in {self.folder} "
                f"({error.strerror}): name a writable folder, on a disk with room"
            ) from error
        weakref.finalize(self, os.close, self._file)
        self._end = 0
        self._free: dict[int, list[int]] = defaultdict(list)  # offsets, by the size's bit length

    def put(self, data: Tensor) -> _FileRange:
        """Write bytes to the file; returns the ticket for ``take``.

        Raises:
            PipelineError: the disk is full, or writing fails.
        """
        region = self._allocate(data.numel())
        view, done = data.numpy().data, 0
        try:
            while done < region.size:
                done += os.pwrite(self._file, view[done:], region.start + done)
        except OSError as error:
            raise PipelineError(
                f"{region.size:,} bytes cannot be offloaded to a file in {self.folder}, which has "
                f"{region.start:,} bytes: {error.strerror}. Free disk space, name another folder "
                "(store=), or offload less"
            ) from error
        return region

    def take(self, ticket: Any, data: Tensor) -> None:
        """Read the bytes of a ticket into ``data``, and free their range.

        Raises:
            PipelineError: reading fails, or the file was truncated.
        """
        view, done = _memory_of(data), 0
        try:
            while done < ticket.size:
                count = os.preadv(self._file, [view[done:]], ticket.start + done)
                if not count:
                    raise OSError(0, f"only {done:,} of {ticket.size:,} bytes are left")
                done += count
        except OSError as error:
            raise PipelineError(
                f"tensors that were offloaded to a file in {self.folder} are lost: "
                f"{error.strerror}. Continue from the last checkpoint, with another folder "
                "(store=) if the disk is faulty"
            ) from error
        self._free[ticket.size.bit_length()].append(ticket.start)

    def _allocate(self, size: int) -> _FileRange:
        """A range of the file for ``size`` bytes: a free range, or a new one at the end. The file's
        ranges are powers of two.
        """
        bits = size.bit_length()
        if free := self._free[bits]:
            return _FileRange(free.pop(), size)
        start, self._end = self._end, self._end + (1 << bits)
        return _FileRange(start, size)


def _memory_of(data: Tensor) -> memoryview:
    """The memory of ``data``, by its address; valid while ``data`` lives.

    ``numpy()`` would mark the storage as shared with NumPy, and a shared storage cannot be
    offloaded a second time.
    """
    return memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")


class PinnedMemory:
    """Offload target of stages on an accelerator: pinned host memory, which torch caches by size.

    Copies run on the caller's stream, and the caller waits for them.

    Args:
        device: the device of the stages.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def put(self, data: Tensor) -> Tensor:
        """Copy ``data`` to the host; returns the copy, which is the ticket for ``take``."""
        host = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=True)
        self.take(data, host)
        return host

    def take(self, ticket: Any, data: Tensor) -> None:
        """Copy the bytes of a ticket into ``data``."""
        data.copy_(ticket, non_blocking=True)
        settle(self.device)


OffloadTarget: TypeAlias = OffloadFile | PinnedMemory
"""Keeps bytes: ``put`` returns a ticket, and ``take`` reads its bytes back, once. One thread may
put while another takes. Both raise PipelineError if the bytes cannot be kept or are lost.
"""


def open_offload_target(
    device: torch.device, folder: str | os.PathLike[str] | None
) -> OffloadTarget:
    """The offload target of a rank whose stages are on ``device``.

    Args:
        device: the device of the stages.
        folder: the folder of the file, only for stages on the CPU; None: the folder of temporary
            files.

    Raises:
        OutputError: no file can be created in ``folder``.
        PipelineError: a folder, and stages that are not on the CPU.
    """
    if device.type == "cpu":
        return OffloadFile(folder)
    if folder is not None:
        raise PipelineError(
            f"store={str(folder)!r} is for stages on the CPU; stages on {device} are offloaded to "
            "pinned memory. Omit store="
        )
    return PinnedMemory(device)


_PIECE, _PIECES = 2**20, 8
_REPEATS = 3
_SWEPT = 2**25  # bytes, more than any core's own cache


def measure_offload(target: OffloadTarget) -> Link:
    """Latency and bandwidth of an offload target, by the slower of ``put`` and ``take``.

    As in a step, several pieces are put before the first is taken. So a piece is no longer in the
    core's cache when it is copied; from the cache, copies would take half the time.
    """
    latency = min(_round_trip(target, 1, 1) for _ in range(_REPEATS))
    seconds = statistics.median(_round_trip(target, _PIECE, _PIECES) for _ in range(_REPEATS))
    return Link(latency, _PIECES * _PIECE / max(seconds, 1e-9))


def _round_trip(target: OffloadTarget, piece: int, count: int) -> float:
    """Seconds of the slower of ``put`` and ``take``; pieces are taken into new memory."""
    data = [torch.ones(piece, dtype=torch.uint8, device=target.device) for _ in range(count)]
    sweeping = torch.zeros(_SWEPT, dtype=torch.uint8, device="cpu").add_(1)
    start = perf_counter()
    tickets = [target.put(tensor) for tensor in data]
    put_seconds = perf_counter() - start
    sweeping.add_(1)
    results = [torch.empty_like(tensor) for tensor in data]
    start = perf_counter()
    for result, ticket in zip(results, tickets, strict=True):
        target.take(ticket, result)
    return max(put_seconds, perf_counter() - start)
