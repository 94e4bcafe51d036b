"""Speeds of links, devices and collectives, from data sheets or measured."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autosplit.errors import AutosplitError, PlanError, SplitError
from autosplit.passes import CollectiveCosts
from autosplit.passes.analysis.operator_cost import balance
from autosplit.torch_internals.distributed import all_reduce_sum


class Link(NamedTuple):
    """One link: latency of a message in seconds, and bandwidth in bytes per second."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def duration(self, size: float, messages: int = 1) -> float:
        """Seconds of a number of messages with so many bytes in all, one after another."""
        return messages * self.latency + size / self.bandwidth


_SIDE = 1024  # of the matrices that are multiplied
_COPIED = 2**26  # bytes: more than caches hold
_TRIES = 5
_CALLS = 200


@dataclass(frozen=True)
class DeviceSpeed:
    """The speed of a device as a roofline: an operator takes the time of computing, or of moving
    its tensors, whichever is longer.

    Attributes:
        flops_per_second: FLOPs per second of matrix products, in the dtype in which the model
            computes.
        bytes_per_second: bytes read and written per second.
        call: the least time of an operator, in seconds.

    Raises:
        PlanError: a rate is not positive, or ``call`` is negative.
    """

    flops_per_second: float
    bytes_per_second: float
    call: float = 0.0

    def __post_init__(self) -> None:
        rates = self.flops_per_second, self.bytes_per_second
        if not (min(rates) > 0.0 and self.call >= 0.0) or math.isnan(sum(rates)):
            raise PlanError(f"DeviceSpeed: rates must be > 0 and call must be >= 0, got {self}")

    def seconds(self, flops: float, moved: float) -> float:
        """Seconds of one operator.

        Args:
            flops: the operator's floating-point operations.
            moved: bytes that the operator reads and writes.
        """
        return max(self.call, flops / self.flops_per_second, moved / self.bytes_per_second)


class DataSheet(NamedTuple):
    """Peak rates of a device: teraflops of matrix products, and gigabytes per second of memory."""

    teraflops: float
    gigabytes_per_second: float


DATA_SHEETS = {
    "a100": DataSheet(312, 2039),
    "h100": DataSheet(989, 3350),
    "h200": DataSheet(989, 4800),
    "b200": DataSheet(2250, 8000),
    "l40s": DataSheet(362, 864),
    "mi300x": DataSheet(1307, 5300),
}
"""Rates by device, from its maker's data sheet: products of 16 bits without sparsity."""


def data_sheet(text: str, error: type[AutosplitError] = PlanError) -> DataSheet:
    """Return the rates of a device.

    Args:
        text: a name of ``DATA_SHEETS``, or teraflops and gigabytes per second, such as
            ``"989,3350"``.
        error: the type of error to raise.

    Raises:
        AutosplitError: of the type ``error``: the text is neither.
    """
    if (sheet := DATA_SHEETS.get(text.lower())) is not None:
        return sheet
    with contextlib.suppress(ValueError, TypeError):
        sheet = DataSheet(*map(float, text.split(",")))
        if all(0.0 < rate < math.inf for rate in sheet):
            return sheet
    raise error(
        f"expected one of {', '.join(DATA_SHEETS)}, or teraflops of matrix products and gigabytes "
        f"per second of memory, such as 989,3350 for an H100; got {text!r}"
    )


def measure_device(
    device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> DeviceSpeed:
    """Measure the speed of a device of this machine, in about a second; each rate is the best of a
    few tries.

    Args:
        device: the device; None: the CPU.
        dtype: the dtype of the matrices.
    """
    device = device or torch.device("cpu")
    a = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
    b, product = torch.ones_like(a), torch.empty_like(a)
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target, one = torch.empty_like(source), torch.ones(1, device=device)

    def launch_calls() -> None:
        for _ in range(_CALLS):
            one.add_(1.0)

    return DeviceSpeed(
        2.0 * _SIDE**3 / _best(lambda: torch.mm(a, b, out=product), device),
        2.0 * _COPIED / _best(lambda: target.copy_(source), device),
        _best(launch_calls, device) / _CALLS,
    )


def _best(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of a few calls, after one call that does not count."""
    seconds = []
    for _ in range(_TRIES + 1):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_of_group(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device of a process group's tensors: this process's GPU for NCCL, else the CPU.

    Args:
        group: the process group; None: the default group.
    """
    # The name of the backend differs if torch chose it, or if there is one per kind of device.
    if "nccl" in dist.get_backend_config(group) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def backend_for(device: torch.device) -> str:
    """The name of the communication backend for a device's tensors: "nccl" for CUDA, else as in the
    default process group.
    """
    if device.type == "cuda":
        return "nccl"
    if not dist.is_initialized():
        return "gloo"
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config()))
    return config.get_device_backend_map().get(device.type, "gloo")


_LARGE = 2**23  # bytes


def measure_collectives(
    ranks: DeviceMesh | dist.ProcessGroup, *, dtype: torch.dtype = torch.float32
) -> CollectiveCosts:
    """Measure the cost of all-reduces between ranks, relative to the speed of their matrix
    products.

    It takes about a second. Collective over these ranks; all get the result of the slowest rank.

    Args:
        ranks: a mesh of one dimension, such as ``mesh["tp"]``, or a process group.
        dtype: the dtype in which the model computes.

    Raises:
        SplitError: ``ranks`` has another type, is a mesh of several dimensions, or is a group
            without this rank or with this rank alone.
    """
    group = _group(ranks)
    device = device_of_group(group)
    moved = measure_device(device, dtype).flops_per_second / balance(device)
    link = measure_all_reduce(group)
    mine = [moved * link.latency, moved / link.bandwidth / 2]
    slowest = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return CollectiveCosts(*slowest.tolist())


def measure_all_reduce(group: dist.ProcessGroup) -> Link:
    """Measure the latency of all-reduces in a group, and the bytes that they reduce in a second.
    All-gathers and reduce-scatters take half the time for each byte. Collective over the group.
    """
    device = device_of_group(group)
    small, large = (
        _best(partial(all_reduce_sum, torch.zeros(n, device=device), group), device)
        for n in (1, _LARGE // 4)
    )
    return Link(small, _LARGE / (large - small) if large > small else math.inf)


def _group(ranks: object) -> dist.ProcessGroup:
    group: Any = ranks
    if isinstance(ranks, DeviceMesh) and ranks.ndim == 1 and ranks.get_coordinate() is not None:
        group = ranks.get_group()
    if not isinstance(group, dist.ProcessGroup) or group.size() < 2:
        raise SplitError(
            "measure_collectives takes a DeviceMesh of one dimension, such as mesh['tp'], or a "
            f"process group, with at least two ranks; every rank must call it. Got {ranks!r}"
        )
    return group
