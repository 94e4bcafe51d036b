"""Devices by name: what their makers' data sheets promise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autosplit.errors import PlanError
from autosplit.mesh.costs import DeviceSpeed, Link

_EFFICIENCY = 0.5  # the share of the promised rates that models reach
_CALL = 5e-6  # seconds between two kernels, whatever they do
_LATENCY = 1e-5  # seconds of a message between two devices


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device.

    Attributes:
        flops: in a second, of dense matrix products by the width of their elements in bytes.
        bandwidth: bytes in a second, of the device's memory.
        memory: bytes.
        link: to a device of the same machine, in one direction.
    """

    flops: Mapping[int, float]
    bandwidth: float
    memory: float
    link: Link

    def speed(
        self, dtype: torch.dtype = torch.bfloat16, efficiency: float = _EFFICIENCY
    ) -> DeviceSpeed:
        """The rates that a model reaches.

        Args:
            dtype: what it computes in.
            efficiency: which share of the promised rates that is.

        Raises:
            PlanError: there is no figure for the dtype.
        """
        if dtype.itemsize not in self.flops:
            widths = ", ".join(f"{8 * width} bits" for width in self.flops)
            raise PlanError(f"there is no figure for {dtype}, only for floats of {widths}")
        flops = self.flops[dtype.itemsize]
        return DeviceSpeed(efficiency * flops, efficiency * self.bandwidth, _CALL)


def link_of(gigabytes: float) -> Link:
    """A link that carries so many gigabytes a second in one direction."""
    return Link(_LATENCY, 1e9 * gigabytes)


def device_kind(device: str) -> DeviceKind:
    """A device by its name in ``DEVICES``; or by teraflops of products and gigabytes a second of
    its memory, as ``"400,2000"``, of a device that holds any.

    Raises:
        PlanError: an unknown name (lists the known ones).
    """
    if device in DEVICES:
        return DEVICES[device]
    try:
        flops, bandwidth = map(float, device.split(","))
    except ValueError:
        flops = bandwidth = math.nan
    if not (flops > 0.0 and bandwidth > 0.0):
        raise PlanError(
            f"unknown device {device!r}; known: {', '.join(DEVICES)}, or teraflops and gigabytes a "
            "second of its memory, such as 400,2000"
        )
    rates = dict.fromkeys((1, 2, 4, 8), 1e12 * flops)
    return DeviceKind(rates, 1e9 * bandwidth, math.inf, Link())


def _kind(half: float, single: float, bandwidth: float, memory: float, link: float) -> DeviceKind:
    """Figures in teraflops, terabytes a second, gigabytes, and gigabytes a second."""
    flops = {2: half * 1e12, 4: single * 1e12}
    return DeviceKind(flops, bandwidth * 1e12, memory * 1e9, link_of(link))


# From https://www.nvidia.com/en-us/data-center/a100/ and its neighbours there, and
# https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html. Dense, without sparsity;
# single precision without TF32, which torch leaves off. Of links, makers state both directions
# together. Variants: SXM.
DEVICES: Mapping[str, DeviceKind] = {
    "a100": _kind(312, 19.5, 2.039, 80, 300),
    "h100": _kind(989, 67, 3.35, 80, 450),
    "h200": _kind(989, 67, 4.8, 141, 450),
    "b200": _kind(2250, 75, 8.0, 180, 900),  # .../dgx-b200/
    "l40s": _kind(362, 91.6, 0.864, 48, 32),
    "mi300x": _kind(1307, 163.4, 5.3, 192, 64),
}
