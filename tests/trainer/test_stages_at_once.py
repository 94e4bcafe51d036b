"""Stages of a cut model, which all ranks build at the same time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from autosplit.pipeline import PipelineTrainer, StageOptions
from autosplit.pipeline.engine.boundaries import Boundary, TensorMeta
from autosplit.planner.cutting import Partition
from autosplit.ranks.groups import Groups
from tests.kept_ranks import ranks
from tests.planner.planned_models import loss, net, tokens

as_cut = Partition.boundaries


def without_gradient(partition: Partition, sizes: Any) -> list[Boundary]:
    """Boundaries in which no tensor needs a gradient, which is wrong."""
    boundaries = as_cut(partition, sizes)
    return [tuple(replace(meta, requires_grad=False) for meta in metas) for metas in boundaries]


def of_other_shapes(partition: Partition, sizes: Any) -> list[Boundary]:
    """Boundaries of another shape, for which no stage can be built."""
    return [(TensorMeta(torch.Size([1]), torch.float32, True),)]


@pytest.mark.parametrize(
    ("predicted", "samples"),
    [(as_cut, 6), (without_gradient, 4), (of_other_shapes, 4)],
)
@ranks(2)
def test_gradients_are_those_of_autograd_whether_the_boundaries_are_predicted_right(
    predicted: Any, samples: int
) -> None:
    waits: list[str] = []
    gather = Groups.gather

    def recorded(groups: Groups, value: Any, *awaited: str) -> Any:
        waits.extend(awaited)
        return gather(groups, value, *awaited)

    inputs, targets = tokens(samples), tokens(samples, seed=1)
    with (
        mock.patch.object(Partition, "boundaries", predicted),
        mock.patch.object(Groups, "gather", recorded),
        PipelineTrainer(
            net(),
            loss,
            torch.optim.SGD,
            stages=2,
            microbatches=2,
            example=tokens(),
            stage_options=StageOptions(planning={"costs": "estimate"}),
        ) as trainer,
    ):
        losses = trainer.forward_backward(inputs, target=targets)
        gradients = {k: g for of in trainer.gradients().values() for k, g in of.items()}
    model = net()
    expected = [loss(model(x), y) for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True)]
    (torch.stack(expected).sum() / 2).backward()
    assert torch.equal(losses, torch.stack(expected).detach())
    assert gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=0, atol=1e-7)
    at_once, in_turn = "all stages to be built", "stage 1 to be built"
    assert at_once in waits
    assert (in_turn in waits) == (predicted is not as_cut)
