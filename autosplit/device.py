"""Streams of accelerators, and random generators of all devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

Accelerator = tuple[str, ModuleType]
"""A kind of device, such as ``"cuda"``, and torch's module for it."""


@functools.cache
def _accelerator() -> Accelerator | None:
    """What this torch was built or extended for, which never changes; whether there are any."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else (found.type, torch.get_device_module(found))


def has_accelerator() -> bool:
    """Whether there may be another device than the CPU."""
    return _accelerator() is not None


def accelerator_kind() -> str:
    """The kind of device that may be here beside the CPU."""
    found = _accelerator()
    return "cuda" if found is None else found[0]


def _in_use() -> Accelerator | None:
    """The accelerator, if this process has set it up, which asking must not do."""
    found = _accelerator()
    if found is None:
        return None
    _, module = found
    return found if getattr(module, "is_initialized", module.is_available)() else None


def has_streams(device: torch.device) -> bool:
    """Whether the device runs later what it is given, in streams that torch knows."""
    found = _accelerator()
    return found is not None and found[0] == device.type and hasattr(found[1], "Stream")


def stream_under(tensors: Iterable[Tensor | None]) -> torch.Stream | None:
    """The stream on which tensors are being made; None where none is on an accelerator."""
    if (found := _in_use()) is None:
        return None
    kind, module = found
    lie_on = (t.device for t in tensors if isinstance(t, Tensor) and t.device.type == kind)
    device = next(lie_on, None)
    if device is None or not hasattr(module, "Stream"):
        return None
    return torch.accelerator.current_stream(device)


def follow(stream: torch.Stream | None, tensors: Sequence[Tensor | None]) -> None:
    """Have the current stream wait for what ``stream`` was given, and the tensors' memory for what
    the current one is given: the allocator thinks of the stream that they were made on only.
    """
    if stream is None:
        return
    current = torch.accelerator.current_stream(stream.device)
    if current == stream:
        return
    current.wait_stream(stream)
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device.type == stream.device.type:
            tensor.record_stream(current)


def done_so_far(device: torch.device) -> torch.Event | None:
    """What the current stream was given until now; None where there are no streams."""
    if not has_streams(device):
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def settle(device: torch.device) -> None:
    """Wait on the host for what the current stream was given."""
    if has_streams(device):
        torch.accelerator.current_stream(device).synchronize()


def take_over(tensors: Iterable[Tensor]) -> None:
    """Tell the allocator that the current stream uses tensors that another one made."""
    for tensor in tensors:
        if has_streams(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class OwnStream:
    """A stream beside the current one; on the CPU nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device) if has_streams(device) else None

    @contextlib.contextmanager
    def behind(self, event: torch.Event | None) -> Iterator[None]:
        """Give this stream what is launched inside, to do behind ``event``."""
        if self._stream is None:
            yield
            return
        if event is not None:
            self._stream.wait_event(event)
        with self._stream:
            yield


def generator_state(device: torch.device) -> Tensor:
    """Where the generator that a device draws from by default stands."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    # There is one of Metal, and no way to say which.
    state: Tensor = module.get_rng_state(*([] if device.type == "mps" else [device]))
    return state


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Have it stand there."""
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    module = torch.get_device_module(device)
    module.set_rng_state(state, *([] if device.type == "mps" else [device]))


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the CPU's generator and that of ``device``. ``torch.manual_seed`` does so for all
    devices, and takes 60 times as long.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        generators = getattr(module, "default_generators", None)  # Metal has only one
        (generators[device.index] if generators else module).manual_seed(seed)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put the generators back at the end: the CPU's, and those of accelerators that this process
    uses.

    Left to itself torch would set up every GPU of the machine, after which processes cannot be
    forked any more, and warn that there are several.
    """
    devices = [torch.device("cpu")]
    if (found := _in_use()) is not None:
        kind, module = found
        devices += [torch.device(kind, index) for index in range(module.device_count())]
    states = [(device, generator_state(device)) for device in devices]
    try:
        yield
    finally:
        for device, state in states:
            set_generator_state(device, state)


class GeneratorStates(NamedTuple):
    """States of the generators that a graph may draw from: the CPU's, and by accelerator its."""

    cpu: Tensor
    accelerators: Mapping[torch.device, Tensor]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> GeneratorStates:
        """Those of the devices that these tensors lie on, as they are now."""
        found = _accelerator()
        kind = None if found is None else found[0]
        devices = {tensor.device for tensor in tensors if tensor.device.type == kind}
        return cls(torch.get_rng_state(), {each: generator_state(each) for each in devices})

    @classmethod
    def on(cls, device: torch.device) -> GeneratorStates:
        """The states of the CPU's generator and of that of ``device``, as they are now."""
        beside = {} if device.type == "cpu" else {device: generator_state(device)}
        return cls(torch.get_rng_state(), beside)

    def unchanged(self) -> bool:
        """Whether the generators still stand there."""
        now = ((generator_state(device), state) for device, state in self.accelerators.items())
        return torch.equal(torch.get_rng_state(), self.cpu) and all(torch.equal(*s) for s in now)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw inside from these states; afterwards the generators are as they were before."""
        with generators_kept():
            self.restore()
            yield

    def restore(self) -> None:
        """Draw from these states from now on."""
        torch.set_rng_state(self.cpu)
        for device, state in self.accelerators.items():
            set_generator_state(device, state)
