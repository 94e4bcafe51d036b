"""Estimates follow from FLOPs and bytes, and need no memory for parameters; devices by name."""

from __future__ import annotations

import math
import resource

import pytest
import torch
from torch import nn

from autosplit.errors import PlanError
from autosplit.mesh.costs import DeviceSpeed
from autosplit.planner.estimate import DEVICES, LINKS, device_kind, estimate
from autosplit.planner.profile import BlockOptions, profile
from tests.planner.chains import Chain, Mlp

X = torch.zeros(4, 16)
COMPUTING = DeviceSpeed(1e9, math.inf)
MOVING = DeviceSpeed(math.inf, 1e9)


def _chain() -> Chain:
    return Chain([nn.Linear(16, 32), Mlp(32), Mlp(32), nn.Linear(32, 8, bias=False)], X)


def test_seconds_by_flops() -> None:
    first, second, third, last = estimate(_chain(), device=COMPUTING).blocks
    product = 2 * 4 * 32 * 8 / 1e9
    assert last.times == pytest.approx((product, product, product))
    assert last.backward_alone == pytest.approx(2 * product)
    # The gradient of the first block's input is not computed.
    assert first.times == pytest.approx((2 * product, 0.0, 2 * product))
    assert second == third
    assert second.forward == pytest.approx(2 * 2 * 4 * 32 * 64 / 1e9)


def test_seconds_by_bytes() -> None:
    last = estimate(_chain(), device=MOVING).blocks[-1]
    x, weight, y = 4 * 4 * 32, 4 * 32 * 8, 4 * 4 * 8
    assert last.times == pytest.approx(tuple(1e-9 * (x + weight + y) for _ in range(3)))


def test_bytes_are_those_of_a_profile() -> None:
    measured = profile(_chain(), seconds=0.02)
    estimated = estimate(_chain(), device=COMPUTING)
    assert estimated.crossing == measured.crossing == estimated.returning == measured.returning
    for ours, theirs in zip(estimated.blocks, measured.blocks, strict=True):
        assert (ours.saved, ours.deferred, ours.parameters) == (
            theirs.saved,
            theirs.deferred,
            theirs.parameters,
        )


@pytest.mark.parametrize("device", [None, torch.device("meta")])
def test_parameters_need_no_memory(device: torch.device | None) -> None:
    width = 30_000  # 3.6 GB of parameters
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        chain = Chain([nn.Embedding(10, width), nn.Linear(width, width)], torch.zeros(4).long())
    costs = estimate(chain, BlockOptions(device=device), device=COMPUTING)
    assert costs.blocks[1].forward == pytest.approx(2 * 4 * width**2 / 1e9)
    assert costs.blocks[1].parameters == 4 * (width**2 + width)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < costs.blocks[1].parameters / 4


@pytest.mark.parametrize("name", DEVICES)
def test_what_is_known_of_a_device(name: str) -> None:
    kind = device_kind(name)
    half, single = kind.speed(torch.float16), kind.speed(torch.float32)
    assert half.flops_per_second == kind.flops[2] / 2 > 2 * single.flops_per_second
    assert half.bytes_per_second == kind.bandwidth / 2 > 1e11
    assert 2e10 < kind.link.bandwidth < kind.bandwidth
    assert kind.memory > 2e10


def test_what_is_not() -> None:
    with pytest.raises(PlanError, match=r"unknown device 'z1'; known: a100, h100"):
        device_kind("z1")
    for rates in ("400", "0,1", "nan,1"):
        with pytest.raises(PlanError, match="such as 400,2000"):
            device_kind(rates)
    assert device_kind("400,2000").speed(torch.float64, 1.0).flops_per_second == 4e14
    with pytest.raises(PlanError, match=r"no figure for torch.float64, only for floats of 16 bits"):
        device_kind("h100").speed(torch.float64)


def test_links() -> None:
    assert device_kind("h100", link="ib-ndr").link.bandwidth == LINKS["ib-ndr"] == 50e9
    assert device_kind("h100", link="12.5").link.bandwidth == 12.5e9
    for text in ("string", "0", "nan"):
        with pytest.raises(PlanError, match=r"unknown link .*known: pcie4"):
            device_kind("h100", link=text)
