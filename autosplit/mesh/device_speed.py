"""How fast a device computes and moves bytes: all that an estimate knows of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from autosplit.errors import PlanError

_SIDE = 1024  # of the matrices that are multiplied
_COPIED = 2**26  # bytes: more than caches hold
_TRIES = 5
_CALLS = 200


@dataclass(frozen=True)
class DeviceSpeed:
    """A roofline: an operator takes the longer of computing and of moving its tensors.

    Attributes:
        flops_per_second: of matrix products, in the dtype that the model computes in.
        bytes_per_second: read plus written.
        call: seconds that an operator takes at least.

    Raises:
        PlanError: a rate that is not positive, or an impossible time.
    """

    flops_per_second: float
    bytes_per_second: float
    call: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = field.name == "call"
            if math.isnan(value) or value < 0.0 or (value == 0.0 and not least):
                raise PlanError(f"{field.name} must be {'>= 0' if least else '> 0'}, got {value!r}")

    def seconds(self, flops: float, moved: float) -> float:
        """How long one operator takes."""
        return max(self.call, flops / self.flops_per_second, moved / self.bytes_per_second)


def measure_device(
    device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> DeviceSpeed:
    """The rates of this machine, measured in about a second: the best of a few tries each.

    Args:
        device: which device; None for the CPU.
        dtype: what matrices are made of.
    """
    device = device or torch.device("cpu")
    a = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
    b, product = torch.ones_like(a), torch.empty_like(a)
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target, one = torch.empty_like(source), torch.ones(1, device=device)

    def calls() -> None:
        for _ in range(_CALLS):
            one.add_(1.0)

    return DeviceSpeed(
        2.0 * _SIDE**3 / _best(lambda: torch.mm(a, b, out=product), device),
        2.0 * _COPIED / _best(lambda: target.copy_(source), device),
        _best(calls, device) / _CALLS,
    )


def _best(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of a few calls, after one that is not counted."""
    found = []
    for _ in range(_TRIES + 1):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
