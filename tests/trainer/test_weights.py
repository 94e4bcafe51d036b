"""Steps whose loss is a mean by weight over microbatches and replicas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autosplit.errors import BatchError
from tests.kept_ranks import ranks
from tests.pipeline import workers

ROWS, COUNT = 8, 4
WEIGHTS = [3.0, 1.0, 5.0, 2.0]


def weighted_mean(model: nn.Module, rows: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    """The mean loss by weight; its gradients are left in ``.grad``."""
    total = sum(weight for *_, weight in rows)
    losses = [weight * F.mse_loss(model(x), y) / total for x, y, weight in rows]
    mean = torch.stack(losses).sum()
    mean.backward()  # type: ignore[no-untyped-call]
    return mean.detach()


def chunks(
    batch: tuple[Tensor, Tensor], weights: list[float]
) -> list[tuple[Tensor, Tensor, float]]:
    return [*zip(batch[0].chunk(COUNT), batch[1].chunk(COUNT), weights, strict=True)]


def assert_gradients(engine: Any, model: nn.Sequential) -> None:
    for stage, gradients in engine.gradients().items():
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model[stage].get_parameter(name).grad)


def test_gradient_and_loss_are_those_of_the_weighted_mean() -> None:
    model, batch = workers.whole(2), workers.data(ROWS)
    mean = weighted_mean(model, chunks(batch, WEIGHTS)).item()
    with workers.trainer(ranks=1, stage_factory=None, max_grad_norm=1e3) as engine:
        plain = engine.evaluate(batch)
        assert torch.equal(engine.evaluate(batch, weight=torch.tensor(WEIGHTS)), plain)
        assert engine.evaluation["loss"] == pytest.approx(mean)
        losses = engine.forward_backward(batch, weight=tuple(WEIGHTS))
        assert torch.equal(losses, plain)
        assert engine.metrics()["loss"] == pytest.approx(mean)
        assert_gradients(engine, model)
        assert engine.step_async(batch, weight=WEIGHTS).means() == {"loss": pytest.approx(mean)}


def test_one_weight_for_the_batch_changes_nothing_in_one_pipeline() -> None:
    batch = workers.data(ROWS)
    with workers.trainer(ranks=1, stage_factory=None) as engine:
        gradients = []
        for weight in (None, 8.0):
            engine.forward_backward(batch, weight=weight)
            gradients.append(
                [g.clone() for row in engine.gradients().values() for g in row.values()]
            )
            for module in engine.modules.values():
                module.zero_grad()
        assert all(map(torch.equal, *gradients))


@ranks(2)
def test_replicas_divide_by_the_weight_of_all() -> None:
    """Each replica has its own batch, and one has weight for two."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "pp"))
    batches = [workers.data(ROWS, seed) for seed in (1, 2)]
    weights: list[Any] = [20.0, WEIGHTS]
    model = workers.whole(2)
    rows = chunks(batches[0], [5.0] * COUNT) + chunks(batches[1], WEIGHTS)
    mean = weighted_mean(model, rows).item()
    with workers.trainer(mesh=mesh, stage_factory=None) as engine:
        replica = mesh["dp_replicate"].get_local_rank()
        engine.forward_backward(batches[replica], weight=weights[replica])
        assert engine.metrics()["loss"] == pytest.approx(mean)
        assert_gradients(engine, model)
        with pytest.raises(BatchError, match=r"rank 1 passes weight=, and rank 0 does not"):
            engine.step(batches[replica], weight=WEIGHTS if replica else None)
        with pytest.raises(BatchError, match=r"weight\[1\] is 0.0"):  # of rank 1 only
            engine.step(batches[replica], weight=[1.0, float(not replica), 1.0, 1.0])
        engine.step(batches[replica], weight=WEIGHTS)


@ranks(2)
def test_ranks_of_a_pipeline_must_pass_the_same_weights() -> None:
    """In a first step, a known one, and a new list, for which ranks send no sizes."""
    batch, rank = workers.data(ROWS), dist.get_rank()
    pairs = [*zip(*(part.chunk(COUNT) for part in batch), strict=True)]
    with workers.trainer(stage_factory=None) as engine:
        for arguments in ({"batch": batch}, {"microbatches": pairs}, {"microbatches": pairs[1:]}):
            weights = WEIGHTS[: len(arguments.get("microbatches", pairs))]
            message = r"the ranks \[0, 1\], which are one pipeline, pass different weights"
            for _ in range(2):
                with pytest.raises(BatchError, match=message):
                    engine.step(**arguments, weight=[weights[0] + rank, *weights[1:]])
                engine.step(**arguments, weight=weights)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([1, 2, -1.0, 1], r"weight\[2\] is -1.0: a weight must be a positive finite number"),
        (torch.tensor([math.nan, 1, 1, 1]), r"weight\[0\] is nan"),
        (math.inf, "weight is inf"),
        ("many", "weight is 'many'"),
        ([1.0, 2.0], "weight has 2 numbers for 4 microbatches"),
        (torch.ones(COUNT, 2), r"weight\[0\] is \[1.0, 1.0\]"),
    ],
)
@pytest.mark.parametrize("call", ["step", "evaluate", "step_async"])
def test_a_wrong_weight_is_refused_and_the_trainer_lives_on(
    call: str, weight: Any, message: str
) -> None:
    batch = workers.data(ROWS)
    with workers.trainer(ranks=1) as engine:
        getattr(engine, call)(batch, weight=1.0)
        with pytest.raises(BatchError, match=message):
            getattr(engine, call)(batch, weight=weight)
        getattr(engine, call)(batch, weight=2.0)
