"""Devices by name."""

from __future__ import annotations

import pytest
import torch

from autosplit.errors import PlanError
from autosplit.planner.estimate import DEVICES, LINKS, device_kind


@pytest.mark.parametrize("name", DEVICES)
def test_what_is_known_of_a_device(name: str) -> None:
    kind = device_kind(name)
    half, single = kind.speed(torch.float16, 1.0), kind.speed(torch.float32, 1.0)
    assert half.flops_per_second == kind.flops[2] > 2 * single.flops_per_second
    assert half.bytes_per_second == kind.bandwidth > 1e11
    assert kind.speed(efficiency=0.25).flops_per_second == 0.25 * kind.flops[2]
    assert 2e10 < kind.link.bandwidth < kind.bandwidth
    assert kind.memory > 2e10
    assert kind.source.startswith("https://")


def test_what_is_not() -> None:
    with pytest.raises(PlanError, match=r"unknown device 'z1'; known: a100, h100.*give its rates"):
        device_kind("z1")
    with pytest.raises(PlanError, match=r"no figure for torch.float64, only for floats of 16 bits"):
        device_kind("h100").speed(torch.float64)
    for efficiency in (0.0, 1.5):
        with pytest.raises(PlanError, match="efficiency is a share above 0"):
            device_kind("h100").speed(efficiency=efficiency)


def test_links() -> None:
    assert device_kind("h100", link="ib-ndr").link.bandwidth == LINKS["ib-ndr"] == 50e9
    assert device_kind("h100", link="12.5").link.bandwidth == 12.5e9
    for text in ("string", "0", "nan"):
        with pytest.raises(PlanError, match=r"unknown link .*known: pcie4"):
            device_kind("h100", link=text)
