"""Optimizer steps: clipping in step_async, and an optimizer that fails on one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError
from tests.kept_ranks import ranks
from tests.pipeline import workers

FACTORS = [0.1, 0.1, 0.1, 30.0, 30.0, 0.1, 0.1, 0.1, 30.0]


class Drawing(nn.Module):
    """Draws random numbers and writes into a buffer, as a model with dropout and batch norm."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = workers.block(index)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.inner(x))
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean())
        return y + self.mean


def trained(call: str, shared: bool) -> dict[str, Any]:
    """Train on batches whose gradients change in size, with a decaying learning rate."""
    torch.manual_seed(7 + dist.get_rank())
    holders = [[(0, "inner.0.weight"), (1, "inner.0.weight")]] if shared else []
    with workers.trainer(
        Drawing,
        optimizer_fn=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        max_grad_norm=1.5,
        shared_parameters=holders,
    ) as engine:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.8)
        results, norms = [], []
        for step, factor in enumerate(FACTORS):
            inputs, targets = workers.data(8, seed=step)
            results.append(getattr(engine, call)((inputs, factor * targets)))
            scheduler.step()
            if call == "step":
                norms.append(engine.grad_norm)
        return {
            "losses": [
                result if isinstance(result, Tensor) else result.wait() for result in results
            ],
            "norms": norms or [result.norm() for result in results],
            "state": copy.deepcopy(engine.state_dict()),
        }


@pytest.mark.parametrize("shared", [False, True])
@ranks(2)
def test_clipped_steps_of_step_async_equal_those_of_step(shared: bool) -> None:
    """Losses, weights, buffers and norms, with dropout and a changing learning rate."""
    waiting = trained("step", shared)
    assert workers.equal(waiting, trained("step_async", shared))
    assert [norm > 1.5 for norm in waiting["norms"]] == [factor > 1 for factor in FACTORS]


class Breaking(torch.optim.SGD):
    """Raises in its second step on rank 1, after it has changed one parameter."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps == 2 and dist.get_rank() == 1:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise ValueError("bad weather")
        super().step()


@ranks(2)
def test_every_rank_hears_of_a_step_that_fails_on_one() -> None:
    with workers.trainer(optimizer_fn=lambda p: Breaking(p, lr=0.5, momentum=0.9)) as engine:
        engine.step(workers.data(8))
        earlier = copy.deepcopy((engine.state_dict(), engine.optimizer.state_dict()["state"]))
        message = "^rank 1 failed in the optimizer step: ValueError: bad weather"
        with pytest.raises(PipelineError, match=message):
            engine.step(workers.data(8, seed=1))
        after = engine.state_dict(), engine.optimizer.state_dict()["state"]
        assert not workers.equal(earlier, after)
