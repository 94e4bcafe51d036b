"""Streams of GPUs, and random generators of all devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor


def stream_under(tensors: Iterable[Tensor | None]) -> torch.cuda.Stream | None:
    """The stream on which tensors are being made; None where none is on a GPU."""
    if not torch.cuda.is_initialized():
        return None
    device = next((t.device for t in tensors if isinstance(t, Tensor) and t.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device)


def follow(stream: torch.cuda.Stream | None, tensors: Sequence[Tensor | None]) -> None:
    """Have the current stream wait for what ``stream`` was given, and the tensors' memory for what
    the current one is given: the allocator thinks of the stream that they were made on only.
    """
    if stream is None:
        return
    current = torch.cuda.current_stream(stream.device)
    if current == stream:
        return
    current.wait_stream(stream)
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            tensor.record_stream(current)


def done_so_far(device: torch.device) -> torch.cuda.Event | None:
    """What the current stream was given until now; None where there are no streams."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def settle(device: torch.device) -> None:
    """Wait on the host for what the current stream was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def take_over(tensors: Iterable[Tensor]) -> None:
    """Tell the allocator that the current stream uses tensors that another one made."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class OwnStream:
    """A stream beside the current one; on the CPU nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def behind(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Give this stream what is launched inside, to do behind ``event``."""
        if self._stream is None:
            yield
            return
        if event is not None:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield


def generators_kept() -> AbstractContextManager[None]:
    """Put the generators back at the end: the CPU's, and those of GPUs that this process uses.

    Left to itself torch would set up every GPU of the machine, after which processes cannot be
    forked any more, and warn that there are several.
    """
    in_use = torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if in_use else []
    return torch.random.fork_rng(devices=devices)


class GeneratorStates(NamedTuple):
    """States of the generators that a graph may draw from: the CPU's, and by GPU its."""

    cpu: Tensor
    gpus: Mapping[torch.device, Tensor]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> GeneratorStates:
        """Those of the devices that these tensors lie on, as they are now."""
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        gpus = {device: torch.cuda.get_rng_state(device) for device in devices}
        return cls(torch.get_rng_state(), gpus)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw inside from these states; afterwards the generators are as they were before."""
        with generators_kept():
            torch.set_rng_state(self.cpu)
            for device, state in self.gpus.items():
                torch.cuda.set_rng_state(state, device)
            yield
