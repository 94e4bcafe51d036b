"""Two losses whose tracing torch gets wrong: in no graph, and as in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autosplit
from autosplit.errors import CaptureError
from tests.semantics.against_autograd import assert_equals_autograd
from tests.zoo import Made

LABELS = torch.tensor([[1, 3, -1, 0, 0], [0, -1, 0, 0, 0], [4, 3, 2, 1, 0]])
LOSSES = {
    "labels": (nn.MultiLabelMarginLoss(reduction="none"), (3, 5), LABELS),
    "single": (nn.MultiMarginLoss(), (3, 5), torch.tensor([1, 0, 4])),
}


def scored(loss: nn.Module) -> nn.Module:
    """Scores of a layer and their loss."""
    return Made(lambda m, x, target: m.loss(m.linear(x), target), linear=nn.Linear(5, 5), loss=loss)


def test_one_graph_is_refused() -> None:
    loss, shape, target = LOSSES["labels"]
    split = autosplit.split(scored(loss), fullgraph=True)
    with pytest.raises(CaptureError, match=r"multilabel_margin_loss.*outside of the split module"):
        split(torch.randn(shape), target)


@pytest.mark.parametrize("name", LOSSES)
def test_parts_are_as_in_eager_mode(name: str) -> None:
    loss, shape, target = LOSSES[name]
    assert_equals_autograd(scored(loss), [(torch.randn(shape), target) for _ in range(2)])
