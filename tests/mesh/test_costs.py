"""What collectives and devices take: measured and estimated."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autosplit
from autosplit import CollectiveCosts, Link, SplitError, Stage, measure_collectives
from autosplit.errors import PlanError
from autosplit.mesh.costs import DeviceSpeed
from autosplit.pipeline import PipelineTrainer, StageOptions
from tests.fake_ranks import fake_mesh

# --- what collectives and operators take: given, or measured by ranks -----------------------------


DEVICE = DeviceSpeed(1e12, 1e11, 1e-6)


def test_rates_are_seconds_of_both() -> None:
    rates = CollectiveCosts(Link(1e-5, 1e9), DEVICE).rates
    assert (rates.flops, rates.bytes, rates.call, rates.start) == (1e12, 1e11, 1e-6, 1e-5)
    assert rates.exchanged == 2e9  # an all-reduce brings each byte there and back


@pytest.mark.parametrize(
    ("link", "device"),
    [
        *((Link(latency, 1e9), DEVICE) for latency in (-1.0, math.inf, math.nan)),
        *((Link(0.0, bandwidth), DEVICE) for bandwidth in (0.0, math.nan)),
        (1e-5, DEVICE),
        (Link(), None),
    ],
)
def test_costs_that_cannot_be(link: Any, device: Any) -> None:
    with pytest.raises(SplitError, match=r"takes a Link\(latency, bandwidth\) of finite seconds"):
        CollectiveCosts(link, device)


@pytest.mark.parametrize("wrong", [Link(1e-5, 1e9), 1e-3, None])
def test_overlap_that_is_neither_a_name_nor_costs(wrong: Any) -> None:
    said = r"'none', or the CollectiveCosts that autosplit.measure_collectives\(mesh\['tp'\]\)"
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.raises(SplitError, match=said):
        autosplit.split(model, overlap=wrong)
    with pytest.raises(SplitError, match=said):
        Stage(model, [x], overlap=wrong)
    if wrong is not None:  # which is the default there
        with pytest.raises(SplitError, match=said):
            PipelineTrainer(
                lambda index: model,
                nn.functional.mse_loss,
                torch.optim.SGD,
                stages=1,
                microbatches=1,
                stage_options=StageOptions(overlap=wrong),
            )


def test_ranks_that_cannot_be_measured() -> None:
    said = "takes a DeviceMesh of one dimension.*of two ranks or more"
    with pytest.raises(SplitError, match=said):
        measure_collectives("tp")  # type: ignore[arg-type]
    with fake_mesh((2, 2), ("pp", "tp")) as mesh:
        for ranks in (mesh, dist.new_group([1, 2])):
            with pytest.raises(SplitError, match=said):
                measure_collectives(ranks)
    with fake_mesh((1,)) as mesh, pytest.raises(SplitError, match=said):
        measure_collectives(mesh["tp"])


def test_what_is_measured_is_what_a_rank_finds() -> None:
    """Of ranks that exchange nothing; real ones are in tests/semantics/parallel."""
    with fake_mesh() as mesh:
        found = measure_collectives(mesh["tp"])
        assert measure_collectives(mesh.get_group(), dtype=torch.bfloat16).link.latency > 0.0
    assert 0.0 < found.link.latency < 0.1
    assert found.link.bandwidth > 1e6
    assert found.device.flops_per_second > 1e8


# --- what a device does in a second ---------------------------------------------------------------


def test_impossible_rates() -> None:
    with pytest.raises(PlanError, match="rates must be > 0 and call must be >= 0, got "):
        DeviceSpeed(0.0, 1.0)
    with pytest.raises(PlanError, match=r"call must be >= 0, got .*call=-1"):
        DeviceSpeed(1.0, 1.0, -1)
