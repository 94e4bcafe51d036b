"""Profiling: each kind of block once, under the trainer's options; the model stays as it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autosplit.pipeline.engine.stages import footprint
from autosplit.planner.profile import BlockOptions, prepare_blocks, profile
from autosplit.runtime.split_options import SplitOptions
from tests.planner.chains import Chain, Mlp

X = torch.zeros(4, 16)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def _chain() -> Chain:
    return Chain([nn.Linear(16, 32), Mlp(32), Mlp(32), Mlp(64 // 2), nn.Linear(32, 8)], X)


def test_one_block_of_each_kind_is_profiled() -> None:
    costs = profile(_chain(), seconds=0.05)
    first, second, third, fourth, last = costs.blocks
    assert second is third is fourth
    assert len({id(block) for block in costs.blocks}) == 3
    assert second.parameters == 4 * (32 * 64 * 2 + 64 + 32)
    assert (second.deferred, last.deferred) == (4 * 4 * (32 + 64 + 64 + 32), 4 * 4 * (32 + 8))
    assert costs.crossing == costs.returning == (512.0,) * 4
    assert first.backward_input == 0.0
    # Those of weights are differences of noisy times.
    assert first.backward_weight == first.backward_alone >= 0.0 <= second.backward_weight
    assert min(second.forward, second.backward_input, costs.call) > 0.0


def test_blocks_add_up_to_what_a_stage_keeps() -> None:
    chain = _chain()
    costs = profile(chain, seconds=0.05)
    for first, last in ((0, 2), (1, 4)):
        kept = footprint(prepare_blocks(chain, first, last, BlockOptions())[0])
        stage = costs.stage(first, last)
        assert (stage.saved, stage.deferred) == kept


def test_the_loss_belongs_to_the_last_block() -> None:
    target = torch.zeros(4, 8)
    plain = profile(_chain(), seconds=0.05)
    lossy = profile(_chain(), BlockOptions(loss_fn=_loss, targets=target), seconds=0.05)
    assert lossy.blocks[-1].saved > plain.blocks[-1].saved
    assert [block.saved for block in lossy.blocks[:-1]] == [
        block.saved for block in plain.blocks[:-1]
    ]


def test_options_reach_the_stages() -> None:
    chain = Chain([nn.Linear(16, 32), nn.Sequential(nn.GELU(), nn.Linear(32, 32), nn.GELU())], X)
    plain = prepare_blocks(chain, 1, 2, BlockOptions(SplitOptions(memory="fast")))[0]
    lean = prepare_blocks(chain, 1, 2, BlockOptions(SplitOptions(memory=600)))[0]
    half = prepare_blocks(chain, 1, 2, BlockOptions(autocast=torch.bfloat16))[0]
    assert footprint(lean)[1] < footprint(plain)[1]
    assert half.output_specs[0][1] is torch.bfloat16


def test_the_model_stays_as_it_is() -> None:
    norm = nn.BatchNorm1d(32)
    chain = Chain([nn.Linear(16, 32), norm, nn.Dropout(0.5), nn.Linear(32, 8)], X)
    weight, mean = chain.modules[0].weight, norm.running_mean
    before = torch.get_rng_state()
    profile(chain, seconds=0.05)
    assert torch.equal(before, torch.get_rng_state())
    assert chain.modules[0].weight is weight
    assert weight.grad is None
    assert norm.running_mean is mean
    assert torch.equal(mean, torch.zeros(32))
    assert norm.num_batches_tracked == 0
