"""Optimizer steps: early ones that must be taken back, and failures on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosplit.pipeline.training.optimizer_step import (
    OptimizerSnapshot,
    clip_gradients,
    leaves_alone,
)
from tests.pipeline.training import update_workers
from tests.ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found(on_ranks: Ranks) -> list[dict[str, Any]]:
    return on_ranks(update_workers.everything, 2, timeout=120)


@pytest.mark.parametrize("case", ["mixed", "shared"])
def test_clipped_steps_in_flight_are_those_that_wait(found: list[Any], case: str) -> None:
    """Losses, weights, buffers and norms, with dropout and a changing learning rate. The step
    behind a clipped one that was not expected runs twice: of nine steps, one.
    """
    for rank in found:
        result = rank[case]
        clipped = result.pop("clipped")
        assert clipped == [factor > 1 for factor in update_workers.FACTORS]
        assert result == {"losses": True, "norms": True, "state": True, "more": 4}


def test_nothing_runs_twice_where_nothing_is_clipped(found: list[Any]) -> None:
    for rank in found:
        assert rank["never"]["more"] == 0
        assert rank["never"]["state"]


def test_every_rank_hears_of_a_step_that_fails_on_one(found: list[Any]) -> None:
    said = "rank 1 failed in the optimizer step: ValueError: bad weather"
    assert [rank["apart"] for rank in found] == [(said, False)] * 2


def test_an_optimizer_that_writes_into_gradients(found: list[Any]) -> None:
    for rank in found:
        assert "Scribbling writes into gradients, so that a step cannot be" in rank["scribbling"]


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0 - 1e-6, 1.0 - 2e-6, 1.0, 1.1, float("nan")])
def test_who_knows_that_clipping_changes_nothing(norm: float) -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([0.3, 0.7])
    clip_gradients([weight], 1.0, norm)
    assert leaves_alone(1.0, norm) == torch.equal(weight.grad, torch.tensor([0.3, 0.7]))


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "NAdam"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_snapshot_goes_back_to_the_same_steps(name: str, steps: int) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)

    def step() -> None:
        weight.grad = torch.randn(3).bfloat16()
        optimizer.step()

    for _ in range(steps):
        step()
    before, snapshot = weight.clone(), OptimizerSnapshot(optimizer, CPU)
    step()
    step()
    first = weight.clone()
    optimizer.param_groups[0]["lr"] = 9.0
    snapshot.restore()
    assert torch.equal(weight, before)
    step()
    step()
    assert torch.equal(weight, first)
    assert not torch.equal(weight, before)
