"""Steps of accumulation="concatenated" against plain autograd, here and in spawned processes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.pipeline.trainer import PipelineTrainer
from tests.pipeline.trainer_options import grouped

Found = tuple[list[str], float]


def batch(seed: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 6, generator=generator)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor, microbatches: int) -> Tensor:
    """The loss of a step, each microbatch by itself (BatchNorm)."""
    pairs = zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)
    return torch.stack([nn.functional.mse_loss(model(x), y) for x, y in pairs]).mean()


def differences(mine: Mapping[int, Mapping[str, Tensor]], model: nn.Sequential) -> float:
    """The greatest distance of a gradient from autograd's, over the norm of its stage's."""
    worst = 0.0
    for stage, grads in mine.items():
        expected = {n: p.grad for n, p in model[stage].named_parameters() if p.grad is not None}
        assert grads.keys() == expected.keys()
        scale = sum(float(each.to_dense().double().norm() ** 2) for each in expected.values())
        for name, grad in grads.items():
            gap = grad.to_dense().double() - expected[name].to_dense().double()
            worst = max(worst, float(gap.norm()) / scale**0.5)
    return worst


def joined_row(engine: PipelineTrainer) -> list[str]:
    """What this rank ran, as its timeline has it."""
    return [str(s.action) for s in engine.timeline().spans if s.rank == engine.rank]


def trained(modules: Sequence[nn.Module], *, steps: int = 2, **options: Any) -> Found:
    """What this rank ran, and how far its gradients are from autograd's, added up over steps."""
    twin = nn.Sequential(*copy.deepcopy(modules))
    given = {"ranks": 1, "accumulation": "concatenated", **options}
    with PipelineTrainer(
        modules,
        nn.functional.mse_loss,
        sgd,
        microbatches=4,
        **grouped(record=True, **given),
    ) as engine:
        for step in range(steps):
            inputs, targets = batch(step)
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(options.get("autocast"))):
                loss = mean_loss(twin, inputs, targets, 4)
            loss.backward()
            engine.forward_backward((inputs, targets))
        return joined_row(engine), differences(engine.gradients(), twin)


def _blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(count)]


def _with_tied() -> list[nn.Module]:
    first, second = _blocks(2)
    second[2].weight = first[0].weight  # type: ignore[index, union-attr]
    return [first, second]


def two_ranks() -> dict[str, Found]:
    """Several trainers, one after another, over two processes."""
    assert dist.get_world_size() == 2
    return {
        "gpipe": trained(_blocks(2), ranks=None, schedule="gpipe", weights="2bp"),
        "tied": trained(_with_tied(), ranks=None, schedule="gpipe", weights="2bp"),
        "chimera": trained(_blocks(2), ranks=None, schedule="chimera", steps=1),
        "auto": trained(_blocks(2), ranks=None, schedule="auto", steps=5),
    }
