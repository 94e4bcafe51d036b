"""A model to plan, and its training over processes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import partition
from autosplit.errors import PlanError
from autosplit.pipeline import PipelineTrainer
from autosplit.planner import WholeModel, captured_model, cutting
from autosplit.planner.costs import BlockCost, ModelCosts
from tests.pipeline.trainer_options import grouped
from tests.planner.planned import even
from tests.zoo import Residual

WIDTH, MICROBATCH = 16, 2


class Net(nn.Module):
    """An embedding, layers with residuals, and a head that is tied to the embedding."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Residual(WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(layers: int = 4) -> Net:
    torch.manual_seed(0)
    return Net(layers)


def tokens(samples: int = MICROBATCH, seed: int = 0) -> Tensor:
    return torch.randint(
        11, (samples, 5), generator=torch.Generator(torch.get_default_device()).manual_seed(seed)
    )


def costs(model: Net) -> ModelCosts:
    """All blocks alike: the embedding, each layer, the head."""
    return even(len(model.layers) + 2)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def factory(layers: str = "2") -> tuple[nn.Module, Tensor]:
    """For the command line."""
    return net(int(layers)), tokens()


def bare() -> nn.Module:
    """A model without example inputs."""
    return net()


def trained(arguments: dict[str, Any], steps: int) -> tuple[list[Tensor], list[str], list[int]]:
    """Train a plan on this process group, and evaluate the last batch.

    Returns:
        the losses of each step and of the evaluation, the names of the rank's parameters, and the
        number of captures of the whole model after the plan, the steps and the evaluation.
    """
    capture = mock.patch.object(
        captured_model, "capture_forward", side_effect=captured_model.capture_forward
    )
    with capture as counted:
        plan = partition(net(), tokens(), **arguments)
        counts = [counted.call_count]
        with plan.trainer(loss, sgd) as engine:
            results = []
            for step in range(steps):
                batch = tokens(plan.batch, step)
                results.append(engine.step((batch, batch)))
            counts.append(counted.call_count)
            results += [engine.evaluate((batch, batch)) for _ in range(2)]
            counts.append(counted.call_count)
            names = [
                name for module in engine.modules.values() for name, _ in module.named_parameters()
            ]
    assert torch.equal(results.pop(), results[-1])
    return results, names, counts


UNEVEN = ModelCosts(
    tuple(
        BlockCost(*map(float, times), 4.0, 3.0, 1.0)
        for times in ((5, 3, 6), (4, 4, 6), (3, 1, 1), (2, 2, 1), (6, 6, 3), (2, 3, 1))
    ),
    (2.0,) * 5,
)
"""Costs of `net()` for which every schedule has another best cut."""


def layers_of_first(**options: Any) -> int:
    """How many layers the first stage gets that a trainer cuts, and no step of which is run."""
    inputs = {"microbatches": 2, "planning": {"costs": UNEVEN}, **options}
    with PipelineTrainer(
        net(),
        loss,
        sgd,
        stages=2,
        example=tokens(),
        **grouped(**inputs),
    ) as engine:
        first = engine.modules.get(0)
        kept = None if first is None else len([*first.get_submodule("layers").children()])
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, kept)
    return next(item for item in results if item is not None)


def cut_by_trainers(cases: dict[str, dict[str, Any]]) -> dict[str, int]:
    """On each rank, the first stages of trainers with these options, from one capture."""
    whole = WholeModel.capture(net(), tokens())
    with mock.patch.object(WholeModel, "capture", return_value=whole):
        return {name: layers_of_first(**options) for name, options in cases.items()}


def measured() -> tuple[tuple[str, ...], float, int]:
    """A plan of ranks that measure: its cuts, its step, and how many gradients that left."""
    model = net(6)
    plan = partition(model, tokens(), stages=2, seconds=0.5)
    touched = [p for p in model.parameters() if p.grad is not None]
    return plan.cuts, plan.predicted_step, len(touched)


def estimated() -> tuple[tuple[str, ...], float, int, str]:
    """A plan of ranks that estimate: its cuts, its step, how often this rank estimated, and the
    error if that fails.
    """
    with mock.patch.object(cutting, "estimate", wraps=cutting.estimate) as estimate:
        plan = partition(net(2), tokens(), stages=2, costs="estimate")
        estimate.side_effect = PlanError("no estimate")
        with pytest.raises(PlanError) as caught:
            partition(net(2), tokens(), stages=2, costs="estimate")
    return plan.cuts, plan.predicted_step, estimate.call_count, str(caught.value)
