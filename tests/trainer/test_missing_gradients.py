"""Parameters that no loss depends on have no gradient, as in autograd: optimizers skip them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from autosplit import PipelineTrainer
from tests.kept_ranks import ranks
from tests.pipeline import workers
from tests.zoo import Made

ROWS, STEPS = 4, 2


class Apart(nn.Module):
    """Passes on a main value and two sides: one computed from a side, one from both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side, self.both = (nn.Linear(workers.WIDTH, workers.WIDTH) for _ in "abc")

    def forward(self, main: Tensor, side: Tensor | None = None, *_: Tensor) -> tuple[Tensor, ...]:
        side = main if side is None else side
        return torch.tanh(self.main(main)), self.side(side), self.both(main) * self.side(side)


def end(used: int) -> nn.Module:
    """A last stage that uses only the first of its inputs."""
    last = nn.Linear(workers.WIDTH, workers.WIDTH)
    return Made(lambda m, *values: m.last(torch.stack(values[:used]).sum(0)), last=last)


class Whole(nn.Module):
    """A sequence of stages with several values between them."""

    def __init__(self, stages: nn.Sequential) -> None:
        super().__init__()
        self.stages = stages

    def forward(self, *values: Tensor) -> Tensor:
        for stage in self.stages:
            built = stage(*values)
            values = built if isinstance(built, tuple) else (built,)
        return values[0]


def of_stages(count: int, used: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [*(Apart() for _ in range(count - 1)), end(used)]


def decaying(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def trained_beside(
    stages: list[nn.Module], options: dict[str, Any], frozen: Sequence[int | None] = (None,)
) -> None:
    """Train a pipeline and the whole model; compare gradients, weights and missing gradients.

    Args:
        stages: the stages of the pipeline.
        options: the options of the trainer.
        frozen: for each step of a round, the stage that is frozen; such a step has fewer samples.
    """
    plain = nn.Sequential(*copy.deepcopy(stages))
    optimizer, inputs = decaying(plain.parameters()), {"stage_factory": None, **options}
    with workers.trainer(stages, microbatches=2, optimizer_fn=decaying, **inputs) as engine:
        for step, at in itertools.product(range(STEPS), frozen):
            batch = workers.data(ROWS if at is None else ROWS - 2, seed=step)
            for index in range(len(stages)):
                stages[index].requires_grad_(index != at)
                plain[index].requires_grad_(index != at)
            optimizer.zero_grad()
            expected = workers.single_process(Whole(plain), *batch, 2)
            assert torch.equal(engine.forward_backward(batch), expected)
            assert_gradients(engine, plain)
            optimizer.step()
            if engine.optimizer is not None:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            for index, module in engine.modules.items():
                assert workers.equal(dict(module.state_dict()), dict(plain[index].state_dict()))


def assert_gradients(
    engine: PipelineTrainer, plain: nn.Sequential, *, allows_zeros: bool = False
) -> None:
    """Compare gradients. If ``allows_zeros``, zeros may stand for a missing gradient."""
    for index, module in engine.modules.items():
        for name, parameter in plain[index].named_parameters():
            mine, place = module.get_parameter(name), f"{index}.{name}"
            if allows_zeros and parameter.grad is None:
                assert mine.grad is None or not mine.grad.any(), place
            elif parameter.grad is None or mine.grad is None:
                assert parameter.grad is mine.grad, place
            else:
                assert torch.equal(mine.grad, parameter.grad), place


FUSED: dict[str, Any] = {"schedule": "1f1b", "split_backward": False}
ZB: dict[str, Any] = {"schedule": "zb-h1"}


@pytest.mark.parametrize(("options", "used"), [(ZB, 1), (FUSED, 2)], ids=str)
@ranks(3)
def test_three_stages(options: dict[str, Any], used: int) -> None:
    """The middle stage has no gradients of parameters that only unused outputs depend on."""
    trained_beside(of_stages(3, used), options)


@pytest.mark.parametrize("options", [FUSED, ZB], ids=str)
@ranks(2)
def test_a_stage_that_is_frozen_for_some_steps(options: dict[str, Any]) -> None:
    trained_beside(of_stages(2, 2), options, frozen=[None, 0, None, 1])


@pytest.mark.parametrize("along", ["dp_replicate", "dp_shard"])
@ranks(2)
def test_in_replicas(along: str) -> None:
    """Gradients are the mean over two shares of the batch; missing ones stay missing."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", along))
    shares = [workers.data(ROWS, seed=seed) for seed in range(2)]
    plain = nn.Sequential(*of_stages(3, 1))
    for share in shares:
        workers.single_process(Whole(plain), *share, 2)

    def build(index: int) -> nn.Module:
        module = of_stages(3, 1)[index]
        return fully_shard(module, mesh=mesh[along]) if along == "dp_shard" else module

    options = {"stages": 3, "microbatches": 2, "stage_factory": None, "mesh": mesh}
    with workers.trainer(build, **options) as engine:
        engine.forward_backward(shares[mesh.get_local_rank(along)])
        grads = engine.gradients()
    for index, module in enumerate(plain):
        expected = {n: p.grad / 2 for n, p in module.named_parameters() if p.grad is not None}
        assert grads[index].keys() == expected.keys()
        for name, gradient in grads[index].items():
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(whole, expected[name], rtol=0, atol=1e-6)


class Branching(nn.Module):
    """A last stage that reads other tensors for other numbers of rows.

    Attributes:
        reads_all: whether it reads all tensors instead, for any number of rows.
    """

    reads_all = False

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(workers.WIDTH, workers.WIDTH)

    def forward(self, main: Tensor, side: Tensor, both: Tensor) -> Tensor:
        if self.reads_all:
            return self.last(main + side + both)
        rows = main.shape[0]
        return self.last(main + side if rows > 3 else side if rows > 1 else both * 2)


def train_lists(steps: Sequence[tuple[list[int], bool]], *, allows_zeros: bool = False) -> None:
    """Train lists of microbatches beside the whole model, and compare gradients.

    Args:
        steps: for each step, the microbatches' numbers of rows, and ``Branching.reads_all``.
        allows_zeros: whether zeros may stand for a missing gradient.
    """
    torch.manual_seed(0)
    stages = [Apart(), Branching()]
    plain = nn.Sequential(*copy.deepcopy(stages))
    with workers.trainer(stages, optimizer_fn=decaying, stage_factory=None) as engine:
        for rows, reads_all in steps:
            for last in (stages[1], plain[1]):
                last.reads_all = reads_all  # type: ignore[assignment]
            pairs = [workers.data(count, seed=count) for count in rows]
            plain.zero_grad()
            losses = [nn.functional.mse_loss(Whole(plain)(x), y) for x, y in pairs]
            for loss in losses:
                loss.backward(torch.tensor(1 / len(rows)))
            found = engine.forward_backward(microbatches=pairs)
            assert torch.equal(found, torch.stack(losses).detach())
            assert_gradients(engine, plain, allows_zeros=allows_zeros)
            if engine.optimizer is not None:
                engine.optimizer.zero_grad()


@ranks(2)
def test_microbatches_of_some_sizes_read_other_tensors() -> None:
    """Each size has the gradients of its own branch, also if its graph is captured later."""
    sizes = [[4, 1, 6], [1, 1], [7, 5], [2, 3], [3], [1, 4], [2, 1]]
    train_lists([(rows, False) for rows in sizes])


@ranks(2)
def test_a_stage_that_changes_between_steps_of_new_sizes_may_change_back() -> None:
    changes = [([4], True), ([5], False), ([6], True), ([5, 8], True), ([7, 2], False), ([1], True)]
    train_lists(changes, allows_zeros=True)
