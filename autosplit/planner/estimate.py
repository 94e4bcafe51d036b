"""Devices by name: what their makers' data sheets promise.

What the blocks of a model cost, estimated: nothing runs, and no parameter needs memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx
from tqdm import tqdm

from autosplit.errors import PlanError
from autosplit.mesh.costs import DeviceSpeed, Link, measure_device
from autosplit.passes.analysis.operator_cost import flops, traffic
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockCost, Limits, ModelCosts
from autosplit.planner.profile import (
    BlockOptions,
    block_cost,
    kinds,
    model_costs,
    prepare_blocks,
)

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

    def limits(self, asked: Limits) -> Limits:
        """What was asked for, with the device's memory and link where nothing was said."""
        cap = self.memory if math.isinf(asked.cap) else asked.cap
        return replace(asked, cap=cap, links=Transfer(*self.link))


def device_kind(device: str, link: str | None = None) -> DeviceKind:
    """A device by its name in ``DEVICES``, or by its rates.

    Args:
        device: its name; or teraflops of products and gigabytes a second of its memory, as
            ``"400,2000"``, of a device that holds any.
        link: a name in ``LINKS``, or gigabytes a second in one direction; None: its own.

    Raises:
        PlanError: an unknown name (lists the known ones).
    """
    kind = DEVICES[device] if device in DEVICES else _of_rates(device)
    return kind if link is None else replace(kind, link=link_of(link))


def _of_rates(text: str) -> DeviceKind:
    try:
        flops, bandwidth = map(float, text.split(","))
    except ValueError:
        flops = bandwidth = math.nan
    if not (flops > 0.0 and bandwidth > 0.0):
        raise PlanError(
            f"unknown device {text!r}; known: {', '.join(DEVICES)}, or teraflops and gigabytes a "
            "second of its memory, such as 400,2000"
        )
    rates = dict.fromkeys((1, 2, 4, 8), 1e12 * flops)
    return DeviceKind(rates, 1e9 * bandwidth, math.inf, Link())


def link_of(text: str) -> Link:
    """A link by its name in ``LINKS``, or by gigabytes a second in one direction.

    Raises:
        PlanError: an unknown name (lists the known ones).
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


def _kind(half: float, single: float, bandwidth: float, memory: float, link: float) -> DeviceKind:
    """Figures in teraflops, terabytes a second, gigabytes, and gigabytes a second."""
    flops = {2: half * 1e12, 4: single * 1e12}
    return DeviceKind(flops, bandwidth * 1e12, memory * 1e9, Link(_LATENCY, link * 1e9))


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

# Between machines, one adapter a device, in one direction.
LINKS: Mapping[str, float] = {
    "pcie4": 32e9,
    "pcie5": 64e9,
    "ib-hdr": 25e9,
    "ib-ndr": 50e9,
    "ethernet-100g": 12.5e9,
}


def estimate(
    whole: WholeModel, options: BlockOptions | None = None, *, device: DeviceSpeed | None = None
) -> ModelCosts:
    """F, I and W of a block of each kind, from the FLOPs and bytes of its graphs.

    A block of each kind is traced and split as a stage would be, on tensors without memory, so
    what it saves and defers is exact, also for a model on the meta device; only the seconds are
    estimates, operator by operator. With ``options.device`` the meta device, a model is
    planned for a machine without the device at hand: torch then chooses kernels as for no device
    in particular, which have attention save its probabilities.

    Args:
        whole: the model in blocks, for one microbatch.
        options: how stages are made of blocks; None for a trainer's defaults. Backends are
            taken to be equally fast.
        device: how fast operators are; None measures the CPU, which takes a second.

    Raises:
        CaptureError: a block cannot be traced.
        SplitError: a block's graph cannot be split, or a bad option.
    """
    options = options or BlockOptions()
    options = replace(options, split=replace(options.split, backend="eager"))
    device = device or measure_device()
    members = kinds(whole, options)
    # None: shown on a terminal, not in a log file.
    shown = tqdm(members, desc="estimating", unit="block", disable=None)
    return model_costs(whole, members, [_cost(whole, own[0], options, device) for own in shown])


def graph_seconds(graph: fx.GraphModule | None, device: DeviceSpeed) -> float:
    """How long one call of a graph takes; nothing for views and the like."""
    if graph is None:
        return 0.0
    moved = ((node, traffic(node)) for node in graph.graph.nodes)
    return sum(device.seconds(flops(node), size) for node, size in moved if size)


def _cost(whole: WholeModel, index: int, options: BlockOptions, device: DeviceSpeed) -> BlockCost:
    stage, _ = prepare_blocks(whole, index, index + 1, options, blank=True)
    graphs = stage.functions.graphs
    parts = (graphs.forward, graphs.backward_input, graphs.backward_weight, graphs.backward)
    return block_cost(stage, *(graph_seconds(graph, device) for graph in parts))
