"""Objects that hold tensors come back from a split module as what they were."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.errors import CaptureError
from tests.semantics.against_autograd import assert_alike

LOG = logging.getLogger(__name__)


@dataclasses.dataclass
class Pair:
    first: Tensor
    label: str
    rest: list[Tensor]


class Cache:
    """Not a dataclass, holds objects that hold tensors, and something that is no tensor."""

    def __init__(self, layers: list[Pair]) -> None:
        self.layers = layers
        self.dtype = torch.float32
        self.empty: list[Tensor] = []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
        LOG.warning("a message in the forward is no obstacle")
        y = self.a(x)
        return self.b(y), Cache([Pair(y, "a", [y * 2, y * 3])])


def loss(result: tuple[Tensor, Cache]) -> Tensor:
    output, cache = result
    return output.square().sum() + cache.layers[0].rest[1].sum() + cache.layers[0].first.sum()


def test_objects_come_back_and_carry_gradients() -> None:
    x = torch.randn(2, 3)

    def drive(call: Any, _: nn.Module) -> None:
        for _ in range(2):
            output, cache = call(x)
            assert type(cache) is Cache
            assert type(cache.layers[0]) is Pair
            assert (cache.dtype, cache.empty, cache.layers[0].label) == (torch.float32, [], "a")
            assert torch.equal(cache.layers[0].rest[0], 2 * cache.layers[0].first)
            loss((output, cache)).backward()

    assert_alike(Model(), drive, pending=2)


def test_paths_name_attributes() -> None:
    functions = autosplit.split(Model()).capture(torch.randn(2, 3))
    assert functions.capture.outputs == (
        "output[0]",
        "output[1].layers[0].first",
        "output[1].layers[0].rest[0]",
        "output[1].layers[0].rest[1]",
    )


def test_an_object_that_refers_to_itself_is_refused() -> None:
    class Child:
        parent: object

    class Batch:
        def __init__(self) -> None:
            self.values, self.child = torch.randn(2, 4), Child()
            self.child.parent = self

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: Batch) -> Tensor:
            return self.linear(batch.values)

    with pytest.raises(CaptureError, match=r"class .*Batch holds tensors and refers to itself"):
        autosplit.split(Model())(Batch())
