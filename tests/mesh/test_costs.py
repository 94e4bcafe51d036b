"""Times of collectives and rates of devices, measured and estimated."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autosplit import SplitError, measure_collectives
from autosplit.errors import PlanError
from autosplit.mesh.costs import DeviceSpeed
from tests.fake_ranks import fake_mesh


def test_ranks_that_cannot_be_measured() -> None:
    message = "takes a DeviceMesh of one dimension.*with at least two ranks"
    with pytest.raises(SplitError, match=message):
        measure_collectives("tp")  # type: ignore[arg-type]
    with fake_mesh((2, 2), ("pp", "tp")) as mesh:
        for ranks in (mesh, dist.new_group([1, 2])):
            with pytest.raises(SplitError, match=message):
                measure_collectives(ranks)
    with fake_mesh((1,)) as mesh, pytest.raises(SplitError, match=message):
        measure_collectives(mesh["tp"])


def test_collectives_are_measured_on_the_ranks_group() -> None:
    """Of ranks that exchange nothing; real ones are in tests/semantics/parallel."""
    with fake_mesh() as mesh:
        result = measure_collectives(mesh["tp"])
        assert measure_collectives(mesh.get_group(), dtype=torch.bfloat16).start > 0.0
    assert result.start > 0.0
    assert result.byte >= 0.0


# --- what a device does in a second ---------------------------------------------------------------


def test_impossible_rates() -> None:
    with pytest.raises(PlanError, match="rates must be > 0 and call must be >= 0, got "):
        DeviceSpeed(0.0, 1.0)
    with pytest.raises(PlanError, match=r"call must be >= 0, got .*call=-1"):
        DeviceSpeed(1.0, 1.0, -1)
