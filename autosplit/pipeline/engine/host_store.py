"""Where a rank keeps bytes outside of the memory that it computes in, and how fast that is."""

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


class _Region(NamedTuple):
    start: int
    size: int


class HostFileStore:
    """For stages on the CPU: a file without a name, which is gone when its process is.

    It is read and written at offsets rather than through a mapping. The pages are the same page
    cache either way, but where a disk is full or a file was cut short, a mapping ends the process
    (SIGBUS) and a call returns an error.

    Args:
        folder: in which file system it lies; None: that of temporary files.

    Raises:
        OutputError: there can be no file there.
    """

    device = torch.device("cpu")

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="autosplit-") as file:
                self._file = os.dup(file.fileno())
        except OSError as error:
            raise OutputError(
                f"no file for offloaded tensors can be made in {self.folder} ({error.strerror}): "
                "name a folder that can be written, on a disk with room"
            ) from error
        weakref.finalize(self, os.close, self._file)
        self._end = 0
        self._free: dict[int, list[int]] = defaultdict(list)

    def put(self, data: Tensor) -> _Region:
        region = self._region(data.numel())
        view, done = data.numpy().data, 0
        try:
            while done < region.size:
                done += os.pwrite(self._file, view[done:], region.start + done)
        except OSError as error:
            raise PipelineError(
                f"{region.size:,} bytes cannot be offloaded to a file in {self.folder}, which has "
                f"{region.start:,} already: {error.strerror}. Free disk space, name another folder "
                "(store=), or offload less"
            ) from error
        return region

    def take(self, ticket: Any, data: Tensor) -> None:
        view, done = _memory_of(data), 0
        try:
            while done < ticket.size:
                count = os.preadv(self._file, [view[done:]], ticket.start + done)
                if not count:
                    raise OSError(0, f"only {done:,} of {ticket.size:,} bytes are left")
                done += count
        except OSError as error:
            raise PipelineError(
                f"what was offloaded to a file in {self.folder} is lost: {error.strerror}. Go on "
                "from the last checkpoint, with another folder (store=) if the disk is at fault"
            ) from error
        self._free[ticket.size.bit_length()].append(ticket.start)

    def _region(self, size: int) -> _Region:
        """Room where something of about the same size lay, or at the end."""
        kind = size.bit_length()
        if free := self._free[kind]:
            return _Region(free.pop(), size)
        start, self._end = self._end, self._end + (1 << kind)
        return _Region(start, size)


def _memory_of(data: Tensor) -> memoryview:
    """Where bytes lie, while ``data`` lives. By address, for ``numpy()`` marks a storage as one
    that others may write into, and such a one could not be moved a second time.
    """
    return memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")


class PinnedStore:
    """For stages on an accelerator: pinned memory of the host, which torch keeps for the next of
    about the same size.

    Copies run on the streams of those who call, who wait for them.

    Args:
        device: where the stages are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def put(self, data: Tensor) -> Tensor:
        host = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=True)
        self.take(data, host)
        return host

    def take(self, ticket: Any, data: Tensor) -> None:
        data.copy_(ticket, non_blocking=True)
        settle(self.device)


HostStore: TypeAlias = HostFileStore | PinnedStore
"""Keeps bytes under a ticket, which ``take`` uses up. One thread may put while another takes; what
cannot be kept, or is not there any more, is a PipelineError.
"""


def open_store(device: torch.device, folder: str | os.PathLike[str] | None) -> HostStore:
    """The store of a rank whose stages are on ``device``.

    Raises:
        OutputError: there can be no file in ``folder``.
        PipelineError: a folder for stages that are not on the CPU.
    """
    if device.type == "cpu":
        return HostFileStore(folder)
    if folder is not None:
        raise PipelineError(
            f"store={str(folder)!r} is for stages on the CPU; those on {device} are offloaded to "
            "pinned memory: leave it out"
        )
    return PinnedStore(device)


_PIECE, _PIECES = 2**20, 8
_REPEATS = 3
_SWEPT = 2**25  # bytes, of which no core has a cache


def measure_store(store: HostStore) -> Link:
    """How long it takes to put and to take, the slower of the two. As in a step, several pieces go
    out before they come back, and what is copied has left the core's own cache by then: hot, it
    would be copied in half the time.
    """
    latency = min(_out_and_back(store, 1, 1) for _ in range(_REPEATS))
    seconds = statistics.median(_out_and_back(store, _PIECE, _PIECES) for _ in range(_REPEATS))
    return Link(latency, _PIECES * _PIECE / max(seconds, 1e-9))


def _out_and_back(store: HostStore, piece: int, count: int) -> float:
    """Seconds of the slower of the two; what comes back comes into new memory."""
    data = [torch.ones(piece, dtype=torch.uint8, device=store.device) for _ in range(count)]
    sweeping = torch.zeros(_SWEPT, dtype=torch.uint8, device="cpu").add_(1)
    start = perf_counter()
    tickets = [store.put(each) for each in data]
    out = perf_counter() - start
    sweeping.add_(1)
    found = [torch.empty_like(each) for each in data]
    start = perf_counter()
    for each, ticket in zip(found, tickets, strict=True):
        store.take(ticket, each)
    return max(out, perf_counter() - start)
