"""Models in which few blocks repeat are captured whole."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import autosplit
from autosplit.capture import export
from autosplit.capture.repeated_blocks import repeated_blocks
from tests import zoo
from tests.capture.regions.blocks import WIDTH, Residual, Stack


class OfWidth(zoo.Residual):
    """The first two blocks are alike; others are wider."""

    def __init__(self, index: int) -> None:
        super().__init__(WIDTH, WIDTH + max(1, index))


class OfThreeWidths(zoo.Residual):
    """Blocks of three kinds, in turn."""

    def __init__(self, index: int) -> None:
        super().__init__(WIDTH, WIDTH + index % 3)


class WithPart(nn.Module):
    """A block with a part; the first block is wider than the others, and its part is not."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH + (index == 0), WIDTH)
        self.parts = nn.ModuleList([Residual(index)])


def test_the_part_of_a_block_that_occurs_once_is_no_repeated_block() -> None:
    assert [*repeated_blocks(Stack(WithPart, 3))] == ["layers.1", "layers.2"]


MODELS = [
    (Stack(OfWidth, 6), 1),
    (Stack(Residual, 6), 2),
    (Stack(OfThreeWidths, 6), 1),
    (Stack(OfThreeWidths, 12), 4),
]


@pytest.mark.parametrize(("model", "captures"), MODELS)
def test_captures(model: Stack, captures: int) -> None:
    traced = mock.Mock(wraps=export.fullgraph_capture)
    with mock.patch.object(export, "fullgraph_capture", traced):
        autosplit.split(model)(torch.randn(5, WIDTH))
    assert traced.call_count == captures
