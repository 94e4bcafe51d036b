"""Estimates that a second process makes are those that one process makes alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autosplit.cli import costs_ahead, plan_costs
from autosplit.cli.costs_ahead import CostsAhead
from autosplit.cli.plan_request import Machine, PlanRequest
from autosplit.cli.planning import plan_factory
from autosplit.planner.costs.limits import Limits
from autosplit.planner.model.captured_model import WholeModel
from autosplit.planner.plan.plan_search import SearchSpace
from tests.interpreters import rank_processes


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that begin with what takes longest to import."""
    monkeypatch.setattr(costs_ahead, "get_context", lambda method: rank_processes())


def squared(base: int, keys: list[int]) -> Iterator[int]:
    for key in keys[:3]:
        yield base + key**2
    raise RuntimeError("no more")


def lasting(keys: list[int]) -> Iterator[int]:
    time.sleep(1000)
    yield keys[0]


def built(layers: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))), (torch.ones(16, 8),)


def test_what_it_finds_is_taken_key_by_key_until_it_fails() -> None:
    ahead = CostsAhead.start(squared, (10,), [1, 2, 3, 4])
    assert ahead is not None
    assert ahead.take(5) is None
    assert [ahead.take(key) for key in (1, 3, 2, 4, 3)] == [11, 19, None, None, None]
    ahead.close()


def test_it_ends_when_it_is_closed() -> None:
    ahead = CostsAhead.start(lasting, (), [1])
    assert ahead is not None
    ahead.close()
    assert ahead.take(1) is None


def test_nothing_is_started_that_cannot_be_told_what_to_do() -> None:
    assert CostsAhead.start(squared, (lambda: 1,), [1]) is None
    assert CostsAhead.start(squared, (1,), []) is None


def test_plans_of_two_processes_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    request = PlanRequest(
        devices=2,
        batch=None,
        limits=Limits(),
        space=SearchSpace(schedules=["1f1b"], microbatches=[2, 4, 8]),
        machine=Machine("h100"),
        estimated=True,
    )
    plans, captured = [], []
    capture = WholeModel.capture

    def counted(model: nn.Module, args: Any, kwargs: Any) -> WholeModel:
        captured.append(args)
        return capture(model, args, kwargs)

    monkeypatch.setattr(WholeModel, "capture", counted)
    for slow in (1e9, 0.0):
        monkeypatch.setattr(plan_costs, "_SLOW", slow)
        plans.append(plan_factory(partial(built, 4), "built", request))
    assert plans[0] == plans[1]
    assert len(captured) == 3 + 2
