"""Programs that know nothing of pending gradients: transformers' Trainer, torch's own split."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input

import autosplit
from autosplit import SplitError
from autosplit.torch_internals.version import TORCH
from tests.zoo import llama


def test_the_inner_loop_of_a_trainer() -> None:
    """Accumulation, a scaler, clipping, norms that a callback logs, a skipped batch."""
    model = llama(attn_implementation="eager")
    plain = copy.deepcopy(model)
    ids = [torch.randint(0, 32, (2, 8)) for _ in range(9)]
    logs: list[list[float]] = [[], []]
    for log, module, under in zip(
        logs, (autosplit.split(model), plain), (model, plain), strict=True
    ):
        optimizer = torch.optim.AdamW(under.parameters(), lr=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(3):
            for x in ids[3 * step : 3 * step + 3]:
                loss = module(input_ids=x, labels=x.clone()).loss / 3
                loss.backward()
            if step == 1:
                under.zero_grad()
                continue
            log += [p.grad.norm().item() for p in under.parameters() if p.grad is not None]
            log.append(float(nn.utils.clip_grad_norm_(under.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            under.zero_grad()
    assert logs[0] == logs[1]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_torchs_own_split_backward_says_what_it_wants() -> None:
    """It would find no weight, and leave every gradient out."""
    split = autosplit.split(nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises((RuntimeError, SplitError)) as caught:
        stage_backward_input([split(x)], [torch.ones(3, 4)], [x], iter(split.parameters()))
    said = caught.value if TORCH < (2, 12) else caught.value.__cause__
    assert isinstance(said, SplitError)
    assert "dw_builder=autosplit.pipelining.dw_builder(module) to torch's" in str(said)
