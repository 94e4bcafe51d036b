"""What ``autosplit plan`` is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from autosplit.errors import PlanError
from autosplit.mesh.costs import DeviceSpeed
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.planner.costs.device_kinds import EFFICIENCY, at_efficiency, device_named, link_named
from autosplit.planner.costs.limits import Limits
from autosplit.planner.cuts.rank_measurement import check_seconds
from autosplit.planner.plan.plan_search import SearchSpace

_CALL = 5e-6  # seconds that an operator takes at least


@dataclass(frozen=True)
class Machine:
    """A machine that is not here.

    Attributes:
        device: a name of ``device_kinds.DEVICES``; None where the rates are given.
        flops: in a second, of matrix products; None: as the device has.
        bandwidth: bytes in a second, of the device's memory; None: as the device has.
        link: a name of ``device_kinds.LINKS``, or gigabytes a second; None: as the device has to
            others of its machine.
        efficiency: which share of the rates a model reaches.
    """

    device: str | None = None
    flops: float | None = None
    bandwidth: float | None = None
    link: str | None = None
    efficiency: float = EFFICIENCY

    def __post_init__(self) -> None:
        if self.device is None and (self.flops is None or self.bandwidth is None):
            raise PlanError(
                "what is the device? Name it (--device h100), or give both its --flops and its "
                "--bandwidth-memory"
            )
        self.speed(torch.bfloat16)
        if self.link is not None:
            link_named(self.link)

    def speed(self, dtype: torch.dtype) -> DeviceSpeed:
        """The rates that a model reaches that computes in ``dtype``."""
        kind = None if self.device is None else device_named(self.device)
        if kind is None:
            made = DeviceSpeed(self.flops or math.nan, self.bandwidth or math.nan, _CALL)
            return at_efficiency(made, self.efficiency)
        if self.flops is None:
            known = kind.speed(dtype, self.efficiency)
        else:
            promised = DeviceSpeed(self.flops, kind.bandwidth, _CALL)
            known = at_efficiency(promised, self.efficiency)
        if self.bandwidth is None:
            return known
        return replace(known, bytes_per_second=self.efficiency * self.bandwidth)

    def limits(self, asked: Limits) -> Limits:
        """What was asked for, with the device's memory and link where nothing was said."""
        kind = None if self.device is None else device_named(self.device)
        cap, links = asked.cap, asked.links
        if kind is not None and math.isinf(cap):
            cap = kind.memory
        if links == Transfer():
            if self.link is not None:
                links = Transfer(*link_named(self.link))
            elif kind is not None:
                links = Transfer(*kind.to_neighbour)
        return replace(asked, cap=cap, links=links)


def machine_of(
    device: str | None,
    teraflops: float | None,
    gigabytes: float | None,
    link: str | None,
    efficiency: float | None,
) -> Machine | None:
    """The machine that the command's options describe; None where they say nothing of one.

    Raises:
        PlanError: they do not say enough, or what cannot be.
    """
    if all(each is None for each in (device, teraflops, gigabytes, link, efficiency)):
        return None
    return Machine(
        device,
        None if teraflops is None else 1e12 * teraflops,
        None if gigabytes is None else 1e9 * gigabytes,
        link,
        EFFICIENCY if efficiency is None else efficiency,
    )


@dataclass(frozen=True)
class PlanRequest:
    """What is asked for.

    Attributes:
        devices: one rank each.
        batch: samples in a step; None: as many as the example inputs have.
        space: what is settled.
        limits: memory and links; links that take no time are measured, unless costs are estimated.
        estimated: from FLOPs and bytes, rather than measured.
        seconds: to measure for, in all.
        backend: how graphs are run.
        rehearse: run a few steps of the best stages, and correct them by that, where this machine
            can run all ranks.
        machine: what the plan is for, where that is not this machine.

    Raises:
        PlanError: seconds that are none.
    """

    devices: int
    batch: int | None
    space: SearchSpace
    limits: Limits
    estimated: bool = False
    seconds: float = 60.0
    backend: str = "eager"
    rehearse: bool = True
    machine: Machine | None = None

    def __post_init__(self) -> None:
        check_seconds(self.seconds)
