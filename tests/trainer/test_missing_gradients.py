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
            for index, module in engine.modules.items():
                for name, parameter in plain[index].named_parameters():
                    mine, place = module.get_parameter(name), f"{index}.{name}"
                    if parameter.grad is None or mine.grad is None:
                        assert parameter.grad is mine.grad, place
                    else:
                        assert torch.equal(mine.grad, parameter.grad), place
            optimizer.step()
            if engine.optimizer is not None:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            for index, module in engine.modules.items():
                assert workers.equal(dict(module.state_dict()), dict(plain[index].state_dict()))


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
