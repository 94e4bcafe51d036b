"""Attributes and state of a split module are those of its model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import autosplit
from autosplit import SplitError
from tests.gradients import assert_same_gradients


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale: float | None = 3.0
        self.pending = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * self.pending if self.scale is None else y * self.scale


def test_an_attribute_that_is_set_to_none_is_set_on_the_model() -> None:
    split: Any = autosplit.split(Scaled())
    for scale, gradient in ((None, 1.0), (5.0, 5.0)):
        split.scale = scale
        assert split.unsplit.scale == scale
        split.zero_grad()
        split(torch.ones(1, 2)).sum().backward()
        assert split.linear.bias.grad.tolist() == [gradient, gradient]


def test_a_layer_that_replaces_a_deleted_one_is_trained() -> None:
    split: Any = autosplit.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    split.pop(-1)
    split.append(nn.Sequential(nn.Linear(2, 1)))
    names = [name for name, _ in split.named_parameters()]
    assert names == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"] == list(split.state_dict())
    del split[0]
    assert [name for name, _ in split.named_parameters()] == ["0.0.weight", "0.0.bias"]


def test_the_training_mode_is_that_of_the_model() -> None:
    split = autosplit.split(nn.Dropout(0.5))
    split.training = False
    assert not split.unsplit.training
    split.unsplit.train()
    assert split.training


def test_an_attribute_named_like_a_member_is_set_on_a_model_that_has_it() -> None:
    split: Any = autosplit.split(Scaled())
    split.pending, split.scale = 4.0, None
    split(torch.ones(1, 2)).sum().backward()
    assert split.linear.bias.grad.tolist() == [4.0, 4.0]
    assert split.pending == 0
    for name in ("report", "pending_bytes"):
        with pytest.raises(
            SplitError, match=f"'{name}' is a member of SplitModule.*unsplit.{name}"
        ):
            setattr(split, name, 1)
    split.max_pending = 3
    assert split.max_pending == 3


def test_a_split_module_is_parametrized_like_its_model() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    split, x = autosplit.split(copy.deepcopy(plain)), torch.randn(4, 3)
    split(x).sum().backward()
    for module in (plain, split):
        module.zero_grad()
        parametrizations.weight_norm(module)
        module(x).square().sum().backward()
    assert type(copy.deepcopy(split)) is type(split)
    assert_same_gradients(split, plain)
    assert len(list(split.parameters())) == 3
    parametrize.remove_parametrizations(split, "weight")
    assert type(split.unsplit) is nn.Linear
