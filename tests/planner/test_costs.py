"""Costs of blocks, timed and counted: each kind of block once, as a trainer makes stages; the
model stays as it is. Devices by name.
"""

from __future__ import annotations

import math
import resource

import pytest
import torch
from torch import Tensor, nn

from autosplit.errors import CaptureError
from autosplit.mesh.costs import DeviceSpeed
from autosplit.pipeline.ledger.prediction import footprint
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, block_stage, estimate, profile
from autosplit.planner.meta_model import meta_model
from autosplit.runtime.options import SplitOptions
from tests.zoo import mlp

X = torch.zeros(4, 16)
COMPUTING = DeviceSpeed(1e9, math.inf)
MOVING = DeviceSpeed(math.inf, 1e9)


def _whole(*modules: nn.Module) -> WholeModel:
    inputs = modules or (nn.Linear(16, 32), mlp(32), mlp(32), nn.Linear(32, 8, bias=False))
    return WholeModel.capture(nn.Sequential(*inputs), X)


def test_seconds_by_flops() -> None:
    first, second, third, last = estimate(_whole(), device=COMPUTING).blocks
    product = 2 * 4 * 32 * 8 / 1e9
    assert last.times == pytest.approx((product, product, product))
    # The gradient of the first block's input is not computed.
    assert first.times == pytest.approx((2 * product, 0.0, 2 * product))
    assert second == third
    assert second.forward == pytest.approx(2 * 2 * 4 * 32 * 64 / 1e9)


def test_seconds_by_bytes() -> None:
    last = estimate(_whole(), device=MOVING).blocks[-1]
    x, weight, y = 4 * 4 * 32, 4 * 32 * 8, 4 * 4 * 8
    assert last.times == pytest.approx(tuple(1e-9 * (x + weight + y) for _ in range(3)))


def test_bytes_are_those_of_a_profile() -> None:
    measured = profile(_whole(), seconds=0.02)
    estimated = estimate(_whole(), device=COMPUTING)
    assert estimated.crossing == measured.crossing
    for ours, theirs in zip(estimated.blocks, measured.blocks, strict=True):
        assert (ours.saved, ours.deferred, ours.parameters) == (
            theirs.saved,
            theirs.deferred,
            theirs.parameters,
        )


@pytest.mark.parametrize("device", [None, torch.device("meta")])
def test_parameters_need_no_memory(device: torch.device | None) -> None:
    width = 30_000  # 3.6 GB of parameters
    earlier = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = meta_model(lambda: nn.Sequential(nn.Embedding(10, width), nn.Linear(width, width)))
    whole = WholeModel.capture(model, torch.zeros(4).long())
    costs = estimate(whole, BlockOptions(device=device), device=COMPUTING)
    assert costs.blocks[1].forward == pytest.approx(2 * 4 * width**2 / 1e9)
    assert costs.blocks[1].parameters == 4 * (width**2 + width)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - earlier
    assert grown * 1024 < costs.blocks[1].parameters / 4


def test_one_block_of_each_kind_is_profiled() -> None:
    costs = profile(_whole(), seconds=0.05)
    first, second, third, last = costs.blocks
    assert second is third
    assert len({id(block) for block in costs.blocks}) == 3
    assert second.parameters == 4 * (32 * 64 * 2 + 64 + 32)
    assert (second.deferred, last.deferred) == (4 * 4 * (32 + 64 + 64 + 32), 4 * 4 * (32 + 8))
    assert costs.crossing == (512.0,) * 3
    assert first.backward_input == 0.0
    assert min(*first.times[::2], *second.times) > 0.0


def test_blocks_add_up_to_what_a_stage_keeps() -> None:
    whole = _whole()
    costs = profile(whole, seconds=0.05)
    for first, last in ((0, 2), (1, 3)):
        kept = footprint(block_stage(whole, first, last, BlockOptions())[0])
        stage = costs.stage(first, last)
        assert (stage.saved, stage.deferred) == kept


def test_options_reach_the_stages() -> None:
    whole = _whole(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
    plain = block_stage(whole, 1, 2, BlockOptions(SplitOptions(memory="fast")))[0]
    lean = block_stage(whole, 1, 2, BlockOptions(SplitOptions(memory=600)))[0]
    half = block_stage(whole, 1, 2, BlockOptions(autocast=torch.bfloat16))[0]
    assert footprint(lean)[1] < footprint(plain)[1]
    assert half.output_specs[0][1] is torch.bfloat16


class Mixed(nn.Module):
    """Fails under autocast, where it multiplies numbers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.autocast("cpu", enabled=False):
            return y @ self.layer.weight


def test_a_block_that_fails_is_named() -> None:
    whole = WholeModel.capture(nn.Sequential(nn.Linear(16, 16), Mixed()), torch.randn(4, 16))
    with pytest.raises(CaptureError, match=r"^block '1.*' of Sequential") as raised:
        profile(whole, BlockOptions(autocast=torch.bfloat16))
    assert "stage" not in str(raised.value).partition(":")[0]


def test_the_model_stays_as_it_is() -> None:
    first, norm = nn.Linear(16, 32), nn.BatchNorm1d(32)
    whole = _whole(first, norm, nn.Dropout(0.5), nn.Linear(32, 8))
    weight, mean = first.weight, norm.running_mean
    earlier = torch.get_rng_state()
    profile(whole, seconds=0.05)
    assert torch.equal(earlier, torch.get_rng_state())
    assert first.weight is weight
    assert weight.grad is None
    assert norm.running_mean is mean
    assert torch.equal(mean, torch.zeros(32))
    assert norm.num_batches_tracked == 0
