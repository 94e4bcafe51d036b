"""Split modules in torch's own stages: told how to run W, and not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autosplit
from autosplit.errors import PipelineError
from autosplit.pipelining import dw_builder
from tests.pipelining.dw_builder_workers import STAGES, both
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(on_ranks: Ranks) -> list[list[dict[str, list[str]]]]:
    return on_ranks(both, 2, timeout=120)


@pytest.mark.parametrize("told", [True, False])
def test_gradients_are_those_of_plain_autograd(
    ranks: list[list[dict[str, list[str]]]], told: bool
) -> None:
    """Without being told, where the schedule does not split; where it does, it is refused
    (tests/autograd/test_trainers.py)."""
    for rank in ranks:
        found = rank[0 if told else 1]
        assert len(found) == (len(STAGES) if told else 4)
        assert [each for each in found.values() if each] == []


def test_each_runner_computes_one_microbatch() -> None:
    module = autosplit.split(nn.Linear(4, 4))
    build = dw_builder(module)
    for _ in range(3):
        module(torch.randn(2, 4, requires_grad=True)).sum().backward()
    build()()
    assert module.pending == 2
    build()()
    build()()
    assert module.pending == 0
    build()()  # a frozen module has nothing


def test_it_takes_split_modules() -> None:
    with pytest.raises(PipelineError, match=r"takes the split module of a stage, got Linear: spl"):
        dw_builder(nn.Linear(4, 4))  # type: ignore[arg-type]
