"""Use streams of accelerators, and the random generators of all devices."""

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
    """This machine's accelerator, if torch supports one. It never changes in a process."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else (device.type, torch.get_device_module(device))


def has_accelerator() -> bool:
    """Whether this machine has another device than the CPU that torch supports."""
    return _accelerator() is not None


def accelerator_kind() -> str:
    """The kind of accelerator of this machine; "cuda" if it has none."""
    accelerator = _accelerator()
    return "cuda" if accelerator is None else accelerator[0]


def _in_use() -> Accelerator | None:
    """The accelerator, if this process has initialised it; else None. The call does not initialise
    it.
    """
    accelerator = _accelerator()
    if accelerator is None:
        return None
    _, module = accelerator
    return accelerator if getattr(module, "is_initialized", module.is_available)() else None


def has_streams(device: torch.device) -> bool:
    """Whether the device runs work asynchronously, in streams of torch."""
    accelerator = _accelerator()
    return (
        accelerator is not None
        and accelerator[0] == device.type
        and hasattr(accelerator[1], "Stream")
    )


def stream_under(tensors: Iterable[Tensor | None]) -> torch.Stream | None:
    """The current stream of the tensors' accelerator; None if no tensor is on one."""
    if (accelerator := _in_use()) is None:
        return None
    kind, module = accelerator
    lie_on = (t.device for t in tensors if isinstance(t, Tensor) and t.device.type == kind)
    device = next(lie_on, None)
    if device is None or not hasattr(module, "Stream"):
        return None
    return torch.accelerator.current_stream(device)


def follow(stream: torch.Stream | None, tensors: Sequence[Tensor | None]) -> None:
    """Make the current stream wait for ``stream``, and record the tensors on the current stream.
    Without the record, the allocator would know only the stream on which a tensor was allocated.
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
    """An event that completes after all present work of the current stream; None without
    streams.
    """
    if not has_streams(device):
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def settle(device: torch.device) -> None:
    """Wait on the host until the current stream has finished."""
    if has_streams(device):
        torch.accelerator.current_stream(device).synchronize()


def take_over(tensors: Iterable[Tensor]) -> None:
    """Tell the allocator that the current stream uses tensors that were allocated on another
    stream.
    """
    for tensor in tensors:
        if has_streams(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class OwnStream:
    """A stream of a device beside the current stream; without effect on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device) if has_streams(device) else None

    @contextlib.contextmanager
    def after(self, event: torch.Event | None) -> Iterator[None]:
        """Launch the work of the ``with`` block on this stream, after ``event``."""
        if self._stream is None:
            yield
            return
        if event is not None:
            self._stream.wait_event(event)
        with self._stream:
            yield


def generator_state(device: torch.device) -> Tensor:
    """The state of a device's default generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    # Metal has one generator, and its function takes no device.
    state: Tensor = module.get_rng_state(*([] if device.type == "mps" else [device]))
    return state


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's default generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    module = torch.get_device_module(device)
    module.set_rng_state(state, *([] if device.type == "mps" else [device]))


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators of the CPU and of ``device``. ``torch.manual_seed`` seeds all devices,
    and takes 60 times as long.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        generators = getattr(module, "default_generators", None)  # Metal has only one
        (generators[device.index] if generators else module).manual_seed(seed)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Context that restores random generators at its end: the CPU's, and the generators of
    accelerators in use.

    ``torch.random.fork_rng`` would initialise every GPU of the machine, and warn if there are
    several. After the initialisation, processes cannot be forked.
    """
    devices = [torch.device("cpu")]
    if (accelerator := _in_use()) is not None:
        kind, module = accelerator
        devices += [torch.device(kind, index) for index in range(module.device_count())]
    states = [(device, generator_state(device)) for device in devices]
    try:
        yield
    finally:
        for device, state in states:
            set_generator_state(device, state)


class GeneratorStates(NamedTuple):
    """States of the generators that a graph may draw from: the CPU's, and each accelerator's."""

    cpu: Tensor
    accelerators: Mapping[torch.device, Tensor]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> GeneratorStates:
        """The present states of the generators of these tensors' devices."""
        accelerator = _accelerator()
        kind = None if accelerator is None else accelerator[0]
        devices = {tensor.device for tensor in tensors if tensor.device.type == kind}
        return cls(torch.get_rng_state(), {device: generator_state(device) for device in devices})

    @classmethod
    def on(cls, device: torch.device) -> GeneratorStates:
        """The present states of the generators of the CPU and of ``device``."""
        beside = {} if device.type == "cpu" else {device: generator_state(device)}
        return cls(torch.get_rng_state(), beside)

    def unchanged(self) -> bool:
        """Whether the generators still have these states."""
        now = ((generator_state(device), state) for device, state in self.accelerators.items())
        return torch.equal(torch.get_rng_state(), self.cpu) and all(torch.equal(*s) for s in now)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Context in which random numbers are drawn from these states; it restores the generators
        at its end.
        """
        with generators_kept():
            self.restore()
            yield

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        for device, state in self.accelerators.items():
            set_generator_state(device, state)
