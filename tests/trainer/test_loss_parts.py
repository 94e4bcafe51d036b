"""Losses with named parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.errors import PipelineError, PythonStateError
from autosplit.pipeline import PipelineTrainer
from tests.kept_ranks import ranks
from tests.pipeline import workers

ROWS, COUNT = 8, 4


def with_parts(output: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Parts of another dtype, and one with a gradient, in no alphabetical order."""
    loss = F.mse_loss(output, targets)
    return loss, {"positive": (output > 0).sum(), "distance": (output - targets).abs().mean()}


def expected(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    rows: dict[str, list[float]] = {"loss": [], "positive": [], "distance": []}
    for x, y in zip(inputs.chunk(COUNT), targets.chunk(COUNT), strict=True):
        loss, parts = with_parts(model(x), y)
        for name, value in {"loss": loss, **parts}.items():
            rows[name].append(value.item())
    return {name: sum(values) / COUNT for name, values in rows.items()}


def trainer(loss_fn: Any, **options: Any) -> PipelineTrainer:
    return workers.trainer(loss_fn=loss_fn, stage_factory=None, **options)


@ranks(2)
def test_all_ranks_know_the_means_of_all_parts_from_the_message_with_the_losses() -> None:
    model, batch = workers.whole(2), workers.data(ROWS)
    losses = workers.single_process(model, *batch, COUNT)
    means = expected(model, *batch)
    counts = []
    with trainer(F.mse_loss) as plain, trainer(with_parts, max_grad_norm=1e3) as engine:
        for one in (plain, engine):
            one.forward_backward(batch)
            for module in one.modules.values():
                module.zero_grad()
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
                assert torch.equal(one.forward_backward(batch), losses)
            counts.append(all_reduce.call_count)
            assert workers.gradients_equal(one.gradients(), model)
        assert counts[0] == counts[1] > 0
        assert {name: engine.metrics()[name] for name in means} == pytest.approx(means)
        engine.evaluate(batch)
        assert engine.evaluation == pytest.approx(means)
        engine.evaluation = {}
        engine.measure(batch, lambda output, _: output.sum().item())
        assert engine.evaluation == pytest.approx(means)
        weighted = (losses * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().item() / 10.0
        engine.evaluate(batch, weight=[1.0, 2.0, 3.0, 4.0])
        assert engine.evaluation["loss"] == pytest.approx(weighted)
        assert engine.step_async(batch).means() == pytest.approx(means)


class SideLoss(nn.Module):
    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        self.last = F.mse_loss(output, targets)
        return self.last


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "metric": (
        lambda o, _: (o.mean(), {"lr": o.sum()}),
        "'lr' names a part of the loss, and another metric",
    ),
    "vector": (lambda o, _: (o.mean(), {"z": o.sum(0)}), r"'z' of the loss must be .*float32\[6\]"),
    "number": (lambda o, _: (o.mean(), {"z": 1.0}), "the part 'z' is a float"),
    "name": (lambda o, _: (o.mean(), {0: o.sum()}), "the part 0 is a Tensor"),
    "no dictionary": (lambda o, _: (o.mean(), o.sum()), r"one real scalar.*float32\[\], float32"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_parts_that_are_no_named_scalars_are_refused(case: str, call: str) -> None:
    loss_fn, message = REFUSED[case]
    with (
        trainer(loss_fn, stages=1, ranks=1) as engine,
        pytest.raises(PipelineError, match=message),
    ):
        getattr(engine, call)(workers.data(ROWS))


def test_evaluation_with_other_parts_than_before_is_refused() -> None:
    names = iter("aab")
    with (
        trainer(lambda o, _: (o.mean(), {next(names): o.sum()}), stages=1, ranks=1) as engine,
        pytest.raises(PipelineError, match=r"the parts \('b',\), and \('a',\) in an earlier"),
    ):
        engine.evaluate(workers.data(ROWS))


def test_a_loss_that_keeps_its_parts_is_told_to_return_them() -> None:
    message = r"loss_fn\.last.*loss_fn may return \(loss, "
    with (
        trainer(SideLoss(), stages=1, ranks=1) as engine,
        pytest.raises(PythonStateError, match=message),
    ):
        engine.step(workers.data(ROWS))


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.max(x, 1)


class Join(nn.Module):
    def forward(self, values: Tensor, indices: Tensor) -> Tensor:
        return (values + indices)[:, None].expand(-1, workers.WIDTH)


def test_a_stage_may_return_a_named_tuple() -> None:
    with workers.trainer(
        [nn.Sequential(nn.Linear(6, 6), Largest()), Join()], stage_factory=None, ranks=1
    ) as engine:
        engine.step(workers.data(ROWS))
