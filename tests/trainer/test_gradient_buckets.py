"""Gradients of replicas in flat buffers, beside plain autograd on the shares of both."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.stage import Stage
from autosplit.trainer import gradient_buckets
from autosplit.trainer.trainer import PipelineTrainer
from tests.kept_ranks import ranks
from tests.mesh.workers import (
    WIDTH,
    M,
    block,
    gradients_of,
    mesh_of,
    of_shares,
    share,
    trainer,
)
from tests.pipeline.ledger import workers as ledger
from tests.zoo import Residual

STAGES = 2


class Mixed(nn.Module):
    """Has parameters of two dtypes, a sparse gradient, a frozen and an unused parameter."""

    def __init__(self, index: int, width: int = 2**15) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.widen, self.narrow = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.table = nn.Embedding(2, WIDTH, sparse=True)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(torch.tanh(self.widen(x))) + self.table((x[:, 0] > 0).long())
        return (y * self.scale).float() * self.frozen


SMALL = partial(Mixed, width=8)


def replicas(build: Any, **options: Any) -> PipelineTrainer:
    """Two replicas of a pipeline of one rank."""
    return trainer(mesh_of(pp=1, dp_replicate=2), build, STAGES, **options)


def expected(build: Any, step: int = 0) -> dict[str, Tensor]:
    """The mean of the gradients of both shares."""
    model = nn.Sequential(*(build(index) for index in range(STAGES)))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False
    return of_shares(model, [share(replica, step) for replica in range(2)], F.mse_loss)[1]


def assert_equal(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        if "table" in name:  # rows of a sparse gradient are added one by one
            torch.testing.assert_close(gradient, theirs[name])
        else:
            assert torch.equal(gradient, theirs[name]), name


@pytest.mark.parametrize(
    ("build", "options"),
    [(Mixed, {"memory": "lean"}), (Mixed, {"split_backward": False}), (SMALL, {})],
    ids=["lean", "fused", "small"],
)
@ranks(2)
def test_gradients_are_those_of_autograd(build: Any, options: dict[str, Any]) -> None:
    with replicas(build, **options) as engine:
        for step in range(2):
            engine.forward_backward(share(dist.get_rank(), step))
            assert_equal(gradients_of(engine), expected(build, step))
            engine.optimizer.zero_grad()


def wide(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, 2**15), nn.Tanh(), nn.Linear(2**15, WIDTH))


@ranks(2)
def test_a_step_has_one_buffer_for_each_bucket_in_the_order_in_which_w_ends() -> None:
    """The stage that is last in the pipeline ends first, and in it its last layer."""
    gradient_buckets.BUCKET_BYTES, default = WIDTH * 2**15, gradient_buckets.BUCKET_BYTES
    try:
        with replicas(wide) as engine:
            engine.forward_backward(share(dist.get_rank()))
            buckets = engine._runner._model.buckets.buckets
            order = [[member.copies[0] for member in bucket.members] for bucket in buckets]
            names = {
                parameter: f"{stage}.{name}"
                for stage, module in engine.modules.items()
                for name, parameter in module.named_parameters()
            }
            storages = {
                parameter.grad.untyped_storage().data_ptr()
                for parameter in names  # type: ignore
            }
    finally:
        gradient_buckets.BUCKET_BYTES = default
    assert [[names[parameter] for parameter in part] for part in order] == [
        ["1.2.weight"],
        ["1.2.bias", "1.0.weight"],
        ["1.0.bias", "0.2.weight"],
        ["0.2.bias", "0.0.weight"],
        ["0.0.bias"],
    ]
    assert len(storages) == len(order)


@pytest.mark.parametrize("accumulation", ["exact", "fused"])
@ranks(2)
def test_reductions_start_in_the_last_w_that_adds_to_their_bucket(accumulation: str) -> None:
    """Buckets 3 to 5 start in the W of stage 0, whose parameters are the last to be complete."""
    log: list[str] = []
    start, weight = gradient_buckets.GradientBucket.start, Stage.backward_weight

    def logged_start(bucket: gradient_buckets.GradientBucket, **options: Any) -> Any:
        log.append(bucket.name.split()[1])
        return start(bucket, **options)

    def logged_weight(stage: Stage, *microbatches: int) -> None:
        weight(stage, *microbatches)
        log.append(f"{stage.index}W{microbatches[-1]}")

    with (
        mock.patch.object(gradient_buckets, "BUCKET_BYTES", WIDTH * 2**15),
        mock.patch.object(gradient_buckets.GradientBucket, "start", logged_start),
        mock.patch.object(Stage, "backward_weight", logged_weight),
        replicas(wide, accumulation=accumulation) as engine,
    ):
        engine.forward_backward(share(dist.get_rank()))
    assert log[-9:] == ["1W2", "0W2", "1", "2", "1W3", "3", "4", "5", "0W3"]


@ranks(2)
def test_a_failure_after_the_first_reductions_ends_all_ranks_with_the_cause() -> None:
    """Rank 0 waits for bucket 3, to which rank 1 does not come."""
    calls: list[Tensor] = []

    def hook(gradient: Tensor) -> None:
        calls.append(gradient)
        if len(calls) == M and dist.get_rank() == 1:
            raise ValueError("bad weather")

    with mock.patch.object(gradient_buckets, "BUCKET_BYTES", WIDTH * 2**15):
        engine = replicas(wide)
        try:
            engine.modules[0][0].weight.register_hook(hook)
            with pytest.raises(PipelineError, match="rank 1 failed in 0W3: ValueError: bad weat"):
                engine.forward_backward(share(dist.get_rank()))
        finally:
            engine.close()


@ranks(2)
def test_gradients_of_earlier_steps_are_added_and_stay_as_they_are() -> None:
    first, second = expected(block, 0), expected(block, 1)
    with replicas(block) as engine:
        parameters = {
            f"{stage}.{name}": parameter
            for stage, module in engine.modules.items()
            for name, parameter in module.named_parameters()
        }

        def run(step: int) -> dict[str, Tensor]:
            engine.forward_backward(share(dist.get_rank(), step))
            return gradients_of(engine)

        kept = run(0)
        assert_equal(run(1), {name: first[name] + second[name] for name in first})
        assert_equal(kept, first)
        engine.optimizer.zero_grad(set_to_none=False)
        assert_equal(run(1), second)
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        assert_equal(run(0), {name: 1.0 + first[name] for name in first})


@ranks(2)
def test_hooks_see_gradients_of_microbatches_and_reduced_ones() -> None:
    seen: list[Tensor] = []
    with replicas(block) as engine:
        weight, bias = engine.modules[0][0].weight, engine.modules[1][0].bias
        weight.register_hook(lambda gradient: 2 * gradient)
        bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        engine.forward_backward(share(dist.get_rank()))
        mine, theirs = gradients_of(engine), expected(block)
    theirs["0.0.weight"] = 2 * theirs["0.0.weight"]
    assert_equal(mine, theirs)
    (gradient,) = seen
    assert torch.equal(gradient, theirs["1.0.bias"])


@ranks(2)
def test_a_parameter_that_one_replica_has_frozen_gets_the_gradient_of_the_other() -> None:
    model = nn.Sequential(*map(block, range(STAGES)))
    alone = of_shares(model, [share(0)], F.mse_loss)[1]
    theirs = {name: gradient / 2 for name, gradient in alone.items() if name.startswith("1.2.")}
    with replicas(block) as engine:
        engine.modules[1][2].requires_grad_(dist.get_rank() == 0)
        engine.modules[1][0].requires_grad_(False)
        engine.forward_backward(share(dist.get_rank()))
        mine = gradients_of(engine)
    assert {"1.2.weight", "1.2.bias"} == {name for name in mine if name.startswith("1.")}
    assert_equal({name: mine[name] for name in theirs}, theirs)


@pytest.mark.parametrize("grad_dtype", [None, torch.float64])
@ranks(2)
def test_memory_with_buckets_is_predicted_to_the_byte(grad_dtype: torch.dtype | None) -> None:
    large = partial(Residual, ledger.WIDTH, 2**13)
    mesh = mesh_of(pp=1, dp_replicate=2)
    with ledger.recorded_step(mesh=mesh, block=large, grad_dtype=grad_dtype) as engine:
        memory, predicted = engine.memory(), ledger.predicted_levels(engine)
    measured = {band.during: band.activations for band in memory.bands[0] if band.during}
    assert predicted == measured
    assert memory.left(0) == 0
    assert max(band.fixed for band in memory.bands[0]) == memory.fixed[0]
