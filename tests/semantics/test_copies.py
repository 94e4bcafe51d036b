"""Copies and pickles of a split module: no graphs, no pending work, the same model."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autosplit
from autosplit import SplitModule


def saved_and_loaded(split: SplitModule) -> SplitModule:
    file = io.BytesIO()
    torch.save(split, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[SplitModule], SplitModule]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda split: pickle.loads(pickle.dumps(split)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("name", COPIES)
def test_copy_is_a_split_module_of_its_own(name: str) -> None:
    split = autosplit.split(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), max_graphs=3, max_pending=math.inf
    )
    x = torch.randn(3, 4)
    split(x)
    other = COPIES[name](split)
    assert other.functions == ()
    assert other.model is not split.model
    assert other.get_submodule("0").weight is other.model[0].weight
    for module in (split, other):
        for _ in range(2):
            module(x).square().sum().backward()
        assert module.pending == 2
        module.backward_weight()
    for mine, theirs in zip(split.parameters(), other.parameters(), strict=True):
        assert mine is not theirs
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", COPIES)
def test_pending_microbatches_stay_with_the_original(name: str) -> None:
    """As ``.grad`` does, which no copy of a parameter has."""
    split = autosplit.split(nn.Linear(4, 4), max_pending=math.inf)
    for _ in range(2):
        split(torch.randn(3, 4)).sum().backward()
    other = COPIES[name](split)
    assert (split.pending, other.pending) == (2, 0)
    assert other.weight.grad is None


def test_state_dict_is_the_models() -> None:
    """Version and extra state of a root module included."""
    model = nn.BatchNorm1d(3)
    split = autosplit.split(model)
    assert split.state_dict()._metadata == model.state_dict()._metadata
    nested = nn.Sequential(split)
    assert list(nested.state_dict()) == [f"0.{key}" for key in model.state_dict()]
    nested.load_state_dict(nn.Sequential(nn.BatchNorm1d(3)).state_dict())
