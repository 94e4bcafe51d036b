"""Gradients of the tensors of a batch equal those of plain autograd, bit for bit."""

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
from autosplit.pipeline import PipelineTrainer
from autosplit.trainer.batch_agreement import _agree_on_grad_slots
from tests.kept_ranks import ranks
from tests.pipeline import workers

ROWS, M = 8, 4
ONE_RANK: dict[str, Any] = {"stage_factory": None, "ranks": 1}


def leaves() -> tuple[Tensor, Tensor]:
    inputs, targets = workers.data(ROWS)
    return inputs.requires_grad_(), targets.requires_grad_()


def expected(times: int = 1, stages: int = 2) -> tuple[Tensor, Tensor]:
    """The gradients of inputs and targets after so many backwards in one process."""
    inputs, targets = leaves()
    for _ in range(times):
        workers.single_process(workers.whole(stages), inputs, targets, M)
    return grad_of(inputs), grad_of(targets)


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split_backward": False},
        {"schedule": "zb-v", "stages": 2},
        {"weights": "2bp", "memory": "lean", "max_grad_norm": 1e9},
        {"stage_factory": workers.ReferenceStage},
    ],
)
def test_leaves_get_the_gradients_of_autograd(options: dict[str, Any]) -> None:
    """Gradients accumulate over steps, and only in tensors that require them."""
    inputs, targets = leaves()
    with workers.trainer(**{**ONE_RANK, **options}) as trainer:
        for _ in range(2):
            trainer.forward_backward(inputs, targets)
        assert all(map(torch.equal, (inputs.grad, targets.grad), expected(2)))
        trainer.evaluate(inputs, targets)
        trainer.step(inputs.detach(), targets)  # another step plan, as the inputs need none
        first, second = expected(3)
        assert not torch.equal(grad_of(inputs), first)
        assert torch.equal(grad_of(targets), second)
        trainer.step_async(inputs, targets).wait()
        assert not torch.equal(grad_of(targets), second)


@ranks(2)
def test_each_rank_has_gradients_of_the_tensors_that_its_stages_use() -> None:
    """A tensor that needs a gradient on another rank is refused."""
    inputs, targets = leaves()
    arguments = (inputs, targets.detach()) if dist.get_rank() == 0 else (None, targets)
    with workers.trainer(stage_factory=None) as trainer:
        with pytest.raises(BatchError, match="needs a gradient, and no stage of this rank"):
            trainer.step(inputs, targets)
        trainer.step(arguments)
    first, second = expected()
    if dist.get_rank() == 0:
        assert torch.equal(grad_of(inputs), first)
    assert targets.grad is None if dist.get_rank() == 0 else torch.equal(targets.grad, second)


@ranks(2)
def test_replicas_have_shares_of_the_mean() -> None:
    """Each replica has the gradient of its samples in the mean over both replicas."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
    inputs, targets = leaves()
    with workers.trainer(stage_factory=None, mesh=mesh) as trainer:
        trainer.forward_backward(inputs, targets)
        first, second = expected()
        assert torch.equal(grad_of(inputs), first / 2)
        assert torch.equal(grad_of(targets), second / 2)
        with pytest.raises(
            BatchError, match=r"of the batch's inputs needs a gradient on the ranks \[1\]; exp"
        ):
            trainer.step(inputs if dist.get_rank() else inputs.detach(), targets)


def weighted(output: Tensor, targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    target, bias, scale = targets
    return F.mse_loss(output + bias, target) * scale


def test_learned_prompts_of_a_frozen_model() -> None:
    """Gradients reach leaves of the user's own graph, and a target without dimensions."""
    inputs, targets = workers.data(ROWS)
    prompt, bias, scale = (torch.full(size, 0.5).requires_grad_() for size in ((6,), (6,), ()))
    model, count = workers.whole(2).requires_grad_(False), M
    shifted, biases = inputs + prompt, bias.tanh().expand(ROWS, -1)
    pieces = (item.chunk(count) for item in (shifted, targets, biases))
    losses = [weighted(model(x), (y, b, scale)) for x, y, b in zip(*pieces, strict=True)]
    torch.stack(losses).mean().backward()
    alone = [grad_of(item).clone() for item in (prompt, bias, scale)]
    prompt.grad = bias.grad = scale.grad = None
    with workers.trainer(list(model), loss_fn=weighted, **ONE_RANK) as trainer:
        trainer.step(inputs + prompt, (targets, bias.tanh().expand(ROWS, -1), scale))
        assert trainer.optimizer is None
    for mine, theirs in zip((prompt, bias, scale), alone, strict=True):
        torch.testing.assert_close(mine.grad, theirs)


def test_a_tensor_that_a_stage_reads_is_passed_in() -> None:
    """The advice of the error for a loss that reads a tensor from outside works."""
    inputs, targets = workers.data(ROWS)
    weight = torch.full((6,), 2.0, requires_grad=True)
    with (
        workers.trainer(loss_fn=lambda o, t: F.mse_loss(o * weight, t), **ONE_RANK) as trainer,
        pytest.raises(Exception, match="or pass it as an input"),
    ):
        trainer.step(inputs, targets)
    with workers.trainer(loss_fn=lambda o, t: F.mse_loss(o * t[1], t[0]), **ONE_RANK) as trainer:
        trainer.step(inputs, (targets, weight.expand(ROWS, -1)))
    assert grad_of(weight).any()


class Skipping(nn.Module):
    """A model whose last stage uses an input of the batch, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        result: Tensor = self.layers(x) * late
        return result


def test_inputs_of_a_model_that_is_cut() -> None:
    """Named inputs of the first and of the last stage get gradients."""
    inputs, targets = workers.data(ROWS)
    x, late = (inputs.clone().requires_grad_() for _ in range(2))
    model = Skipping()
    for one, other, y in zip(x.chunk(M), late.chunk(M), targets.chunk(M), strict=True):
        (F.mse_loss(model(one, other), y) / M).backward()
    first, second, x.grad, late.grad = x.grad, late.grad, None, None
    example = {"x": inputs[: ROWS // M], "late": inputs[: ROWS // M]}
    with PipelineTrainer(
        Skipping(), F.mse_loss, torch.optim.SGD, stages=2, microbatches=M, ranks=1, example=example
    ) as trainer:
        trainer.step(x=x, late=late, target=targets)
    assert torch.equal(grad_of(x), first)
    assert torch.equal(grad_of(late), second)


def test_gradients_needed_on_several_ranks_are_refused() -> None:
    with pytest.raises(BatchError, match=r"item 1 of the batch's inputs .* the ranks \[0, 2\]"):
        _agree_on_grad_slots([[("inputs", 1)], [], [("inputs", 1)]], [(0, 1, 2)])


def test_a_skipped_step_leaves_no_gradients() -> None:
    inputs, targets = leaves()
    with torch.no_grad():
        targets[0] = math.inf
    with workers.trainer(nonfinite="skip", **ONE_RANK) as trainer:
        trainer.step(inputs, targets)
    assert inputs.grad is targets.grad is None
