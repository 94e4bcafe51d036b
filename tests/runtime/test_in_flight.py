"""W of several microbatches in one call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit import SplitError, Stage
from tests.microbatches import Twins, reference


@pytest.mark.parametrize("name", ["tied", "convolutions", "bfloat16"])
def test_concatenated_microbatches_agree_but_for_rounding(name: str) -> None:
    twins = Twins(name, 5, accumulation="concatenated")
    twins.forward()
    twins.backward()
    for several in ([0, 1], [3, 2], [4]):
        twins.stage.backward_weight(several)
    assert twins.stage.deferred_bytes == 0
    twins.assert_rounded()


def test_microbatches_of_two_graphs_are_not_concatenated() -> None:
    """The model changed in between: each graph's own microbatches go together."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Linear(3, 2))
    stage = Stage(model, [torch.randn(4, 3, requires_grad=True)], accumulation="concatenated")
    batches = [torch.randn(4, 3) for _ in range(4)]
    for m, batch in enumerate(batches):
        model.train(m < 2)
        stage.forward(m, [batch.clone()])
        stage.backward_input(m, [torch.ones(4, 2)])
    stage.backward_weight([0, 1, 2, 3])
    stage.publish()
    mine = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    reference(model, batches, [torch.ones(4, 2)] * 4)
    for gradient, parameter in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_several_microbatches_asked_for_wrongly() -> None:
    stage = Stage(nn.Linear(3, 2), [torch.randn(4, 3)], accumulation="concatenated")
    for m in range(2):
        stage.forward(m, [torch.randn(4, 3)])
        stage.backward_input(m, [torch.randn(4, 2)])
    with pytest.raises(SplitError, match="stage 0: W of microbatch 1 is asked for twice"):
        stage.backward_weight([1, 0, 1])
    with pytest.raises(SplitError, match="microbatch 7 has not run backward_input"):
        stage.backward_weight([0, 7])
    stage.backward_weight([0, 1])
