"""What a device does in a second."""

from __future__ import annotations

import pytest

from autosplit.errors import PlanError
from autosplit.mesh.costs import DeviceSpeed, measure_device


def test_rates_of_this_machine() -> None:
    found = measure_device()
    assert found.flops_per_second > 1e8
    assert found.bytes_per_second > 1e8
    assert 0.0 < found.call < 1e-2


def test_impossible_rates() -> None:
    with pytest.raises(PlanError, match="flops_per_second must be > 0, got 0"):
        DeviceSpeed(0.0, 1.0)
    with pytest.raises(PlanError, match="call must be >= 0, got -1"):
        DeviceSpeed(1.0, 1.0, -1)
