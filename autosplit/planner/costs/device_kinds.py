"""Devices by name: what their makers' data sheets promise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from autosplit.errors import PlanError
from autosplit.mesh.costs import DeviceSpeed, Link

EFFICIENCY = 0.5
"""The share of the promised rates that models reach, unless it is known better."""

_CALL = 5e-6  # seconds between two kernels, whatever they do
_LATENCY = 1e-5  # seconds of a message between two devices


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device.

    Attributes:
        flops: in a second, of dense matrix products by the width of their elements in bytes.
        bandwidth: bytes in a second, of the device's memory.
        memory: bytes.
        link: bytes in a second to a device of the same machine, in one direction.
        source: where the figures are from.
    """

    flops: Mapping[int, float]
    bandwidth: float
    memory: float
    link: float
    source: str

    @property
    def to_neighbour(self) -> Link:
        """The link to a device of the same machine."""
        return Link(_LATENCY, self.link)

    def speed(
        self, dtype: torch.dtype = torch.bfloat16, efficiency: float = EFFICIENCY
    ) -> DeviceSpeed:
        """The rates that a model reaches.

        Args:
            dtype: what it computes in.
            efficiency: which share of the promised rates that is.

        Raises:
            PlanError: there is no figure for the dtype, or a share that is none.
        """
        if dtype.itemsize not in self.flops:
            widths = ", ".join(f"{8 * width} bits" for width in self.flops)
            raise PlanError(
                f"there is no figure for {dtype}, only for floats of {widths}: give flops"
            )
        return at_efficiency(
            DeviceSpeed(self.flops[dtype.itemsize], self.bandwidth, _CALL), efficiency
        )


def _kind(
    half: float, single: float, bandwidth: float, memory: float, link: float, source: str
) -> DeviceKind:
    """Figures in teraflops, terabytes a second, gigabytes, and gigabytes a second."""
    flops = {2: half * 1e12, 4: single * 1e12}
    return DeviceKind(flops, bandwidth * 1e12, memory * 1e9, link * 1e9, source)


_NVIDIA = "https://www.nvidia.com/en-us/data-center"

# Dense, without sparsity; single precision without TF32, which torch leaves off. Of links, makers
# state both directions together. Variants: SXM.
DEVICES: Mapping[str, DeviceKind] = {
    "a100": _kind(312, 19.5, 2.039, 80, 300, f"{_NVIDIA}/a100/"),
    "h100": _kind(989, 67, 3.35, 80, 450, f"{_NVIDIA}/h100/"),
    "h200": _kind(989, 67, 4.8, 141, 450, f"{_NVIDIA}/h200/"),
    "b200": _kind(2250, 75, 8.0, 180, 900, f"{_NVIDIA}/dgx-b200/"),
    "l40s": _kind(362, 91.6, 0.864, 48, 32, f"{_NVIDIA}/l40s/"),
    "mi300x": _kind(
        1307,
        163.4,
        5.3,
        192,
        64,
        "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    ),
}

# Between machines, one adapter a device, in one direction.
LINKS: Mapping[str, float] = {
    "pcie4": 32e9,
    "pcie5": 64e9,
    "ib-hdr": 25e9,
    "ib-ndr": 50e9,
    "ethernet-100g": 12.5e9,
}


def device_named(name: str) -> DeviceKind:
    """One of ``DEVICES``.

    Raises:
        PlanError: there is none of this name (lists the known ones).
    """
    if name not in DEVICES:
        raise PlanError(
            f"unknown device {name!r}; known: {', '.join(DEVICES)}, or give its rates: flops and "
            "the bandwidth of its memory"
        )
    return DEVICES[name]


def link_named(text: str) -> Link:
    """A link by its name in ``LINKS``, or by gigabytes a second in one direction.

    Raises:
        PlanError: neither (lists the known names).
    """
    try:
        bandwidth = LINKS[text] if text in LINKS else 1e9 * float(text)
    except ValueError:
        bandwidth = math.nan
    if not bandwidth > 0.0:
        raise PlanError(
            f"unknown link {text!r}; known: {', '.join(LINKS)}, or a number of gigabytes a second"
        )
    return Link(_LATENCY, bandwidth)


def at_efficiency(speed: DeviceSpeed, efficiency: float) -> DeviceSpeed:
    """The share of these rates that is reached.

    Raises:
        PlanError: it is not above 0 and at most 1.
    """
    if not 0.0 < efficiency <= 1.0:
        raise PlanError(f"efficiency is a share above 0, 1 at most; got {efficiency!r}")
    return replace(
        speed,
        flops_per_second=efficiency * speed.flops_per_second,
        bytes_per_second=efficiency * speed.bytes_per_second,
    )
