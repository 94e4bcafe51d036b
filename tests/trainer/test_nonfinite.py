"""Steps whose gradients are not all finite."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline import PipelineTrainer
from autosplit.trainer.trained_parameters import GradientNorms
from tests.kept_ranks import ranks
from tests.pipeline import workers

ROWS = 8
SKIPPING: list[dict[str, Any]] = [
    {"nonfinite": "skip"},
    {"nonfinite": "skip", "max_grad_norm": 0.1},
]


def infinite() -> tuple[Tensor, Tensor]:
    """A batch whose sample 3, of microbatch 1, has an infinite target."""
    inputs, targets = workers.data(ROWS)
    targets[3] = math.inf
    return inputs, targets


def weights(trainer: PipelineTrainer) -> list[Tensor]:
    return [p.detach().clone() for module in trainer.modules.values() for p in module.parameters()]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(map(torch.equal, one, other))


@ranks(2)
@pytest.mark.parametrize("call", ["step", "forward_backward", "step_async"])
@pytest.mark.parametrize("norm", [None, 0.1])
def test_by_default_all_ranks_raise_and_no_weight_changes(call: str, norm: float | None) -> None:
    """The error names the stage, the microbatch and their rank."""
    with workers.trainer(max_grad_norm=norm) as trainer:
        trainer.step(workers.data(ROWS))
        earlier = weights(trainer)
        with pytest.raises(PipelineError, match=r"not finite in stage \d") as caught:
            getattr(trainer, call)(infinite())
        assert_equal(earlier, weights(trainer))
    # In step_async without a norm, a rank may raise for its own gradients.
    if (call, norm, dist.get_rank()) != ("step_async", None, 0):
        assert "stage 1 (rank 1)" in str(caught.value)
        assert "the loss is inf for microbatch 1 (rank 1)" in str(caught.value)
    # That rank does not know the losses; only the rank of the last stage does.
    assert "finite for all microbatches" not in str(caught.value)


@ranks(2)
@pytest.mark.parametrize("call", ["step", "step_async"])
@pytest.mark.parametrize("options", SKIPPING)
def test_a_skipped_step_leaves_no_trace(call: str, options: dict[str, Any]) -> None:
    with workers.trainer(**options) as one, workers.trainer(**options) as other:
        for batch in (workers.data(ROWS), infinite(), workers.data(ROWS, seed=7)):
            getattr(one, call)(batch)
            if batch[1].isfinite().all():
                getattr(other, call)(batch)
        assert_equal(weights(one), weights(other))
        assert (one.metrics()["skipped"], other.metrics()["skipped"]) == (1, 0)
        assert one.metrics()["loss"] == other.metrics()["loss"]


@ranks(2)
@pytest.mark.parametrize("call", ["step", "step_async"])
@pytest.mark.parametrize("earlier", ["bad", "good bad"])
def test_a_step_of_several_batches_is_skipped_whole(call: str, earlier: str) -> None:
    """Although its last batch is finite; the next step is as if it had never been."""
    good = workers.data(ROWS)
    batches = {"good": good, "bad": infinite()}
    with workers.trainer(nonfinite="skip") as one, workers.trainer(nonfinite="skip") as other:
        before = weights(one)
        for name in earlier.split():
            one.forward_backward(batches[name])
            one.evaluate(good)
        getattr(one, call)(good)
        assert_equal(before, weights(one))
        assert not any(one.gradients().values())
        for engine in (one, other):
            engine.forward_backward(good)
            getattr(engine, call)(good)
        assert_equal(weights(one), weights(other))
        assert one.metrics()["skipped"] == 1


@ranks(2)
def test_an_optimizer_that_the_user_calls_skips_the_step_too() -> None:
    with workers.trainer(nonfinite="skip") as trainer:
        earlier, optimizer = weights(trainer), trainer.optimizer
        assert optimizer is not None
        trainer.forward_backward(workers.data(ROWS))
        losses = trainer.forward_backward(infinite())
        assert losses.isinf().tolist() == [False, True, False, False]
        # Evaluation has no gradients to look at.
        assert trainer.evaluate(infinite()).isinf().any()
        trainer.forward_backward(workers.data(ROWS))
        optimizer.step()
        assert_equal(earlier, weights(trainer))
        assert not any(trainer.gradients().values())
        assert trainer.metrics()["skipped"] == 1
        # Cleared gradients begin a step, too.
        trainer.forward_backward(infinite())
        optimizer.zero_grad()
        trainer.forward_backward(workers.data(ROWS))
        optimizer.step()
        assert not all(map(torch.equal, earlier, weights(trainer)))


class Kink(nn.Module):
    """Has an infinite gradient of its weight, and finite outputs and input gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(workers.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sqrt()


def kinked(index: int) -> nn.Module:
    return nn.Sequential(workers.block(index), Kink()) if index == 0 else workers.block(index)


@ranks(2)
@pytest.mark.parametrize("nonfinite", ["raise", "skip", "ignore"])
def test_ranks_with_finite_gradients_do_as_the_others(nonfinite: str) -> None:
    """Only rank 0 has a gradient that is not finite, and a finite loss."""
    with workers.trainer(kinked, nonfinite=nonfinite) as trainer:
        earlier = weights(trainer)
        if nonfinite == "raise":
            wrong = r"stage 0 \(rank 0\), and the loss is finite for all microbatches"
            with pytest.raises(PipelineError, match=wrong):
                trainer.step(workers.data(ROWS))
        else:
            trainer.step(workers.data(ROWS))
        moved = not all(map(torch.equal, earlier, weights(trainer)))
        assert moved == (nonfinite == "ignore")


@ranks(2)
def test_step_async_raises_on_all_ranks() -> None:
    with workers.trainer(kinked) as trainer:
        earlier = weights(trainer)
        with pytest.raises(PipelineError, match="not finite in stage 0"):
            trainer.step_async(workers.data(ROWS)).wait()
        if dist.get_rank() == 0:
            assert_equal(earlier, weights(trainer))


@ranks(2)
def test_checking_gradients_adds_no_all_reduce() -> None:
    counts = []
    for nonfinite in ("ignore", "raise"):
        with workers.trainer(nonfinite=nonfinite) as trainer:
            trainer.step(workers.data(ROWS))
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
                trainer.step(workers.data(ROWS))
            counts.append(all_reduce.call_count)
    assert counts[0] == counts[1] > 0


def test_a_loss_that_is_not_finite_raises_no_error_alone() -> None:
    """All targets of microbatch 1 are ignored: its loss is 0 / 0, its gradients are zeros."""
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    targets = torch.tensor([0, 1, -100, -100])
    with PipelineTrainer(
        stages, F.cross_entropy, torch.optim.SGD, microbatches=2, ranks=1
    ) as trainer:
        assert trainer.step(torch.ones(4, 4), targets).isnan().tolist() == [False, True]


def test_large_numbers_are_finite() -> None:
    """Numbers are finite although their squares overflow in the gradient's dtype."""
    parameters = []
    for dtype, value in ((torch.float32, 1e30), (torch.float16, 6e4), (torch.float32, math.nan)):
        parameters.append(nn.Parameter(torch.zeros(3, dtype=dtype)))
        parameters[-1].grad = torch.full((3,), value, dtype=dtype)
    result = GradientNorms([*parameters, nn.Parameter(torch.zeros(1))], squares=False).nonfinite()
    assert [*map(id, result)] == [id(parameters[-1])]


def test_an_unknown_value_of_nonfinite_is_refused() -> None:
    with pytest.raises(PipelineError, match="one of 'raise', 'skip', 'ignore'; got 'warn'"):
        workers.trainer(ranks=1, nonfinite="warn")
