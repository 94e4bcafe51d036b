"""Several threads with one split module."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

import autosplit


def test_threads_share_one_queue() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    plain = copy.deepcopy(model)
    split = autosplit.split(model, max_pending=math.inf)
    batches = [torch.randn(4 + index % 2, 8, dtype=torch.float64) for index in range(24)]

    def work(batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        split(x).square().sum().backward()
        return x.grad

    with ThreadPoolExecutor(4) as pool:
        grads = list(pool.map(work, batches))
        assert split.pending == len(batches)
        assert len(split.functions) == 2
        list(pool.map(lambda _: split.backward_weight(), batches))
    assert split.pending == 0
    for batch, grad in zip(batches, grads, strict=True):
        x = batch.clone().requires_grad_()
        plain(x).square().sum().backward()
        assert torch.equal(grad, x.grad)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    torch.optim.SGD(model.parameters()).step()  # no guard is left behind


def test_two_modules_captured_at_once() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)]
    splits = [autosplit.split(model) for model in models]
    x = torch.randn(2, 4)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda split: split(x), splits))
    for model, output in zip(models, outputs, strict=True):
        assert torch.equal(model(x), output)
