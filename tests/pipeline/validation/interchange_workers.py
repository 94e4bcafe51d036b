"""What runs in the processes of the interchange tests."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime


def step_with_torch(path: str) -> float:
    """One step of torch's runtime under the schedule in ``path``: the largest gradient error."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)]
    inputs = torch.randn(8, 4, dtype=torch.float64)
    targets = torch.randn(8, 4, dtype=torch.float64)
    expected = _gradients(layers, inputs, targets)
    held = {0: (0, 3), 1: (1, 2)}[rank]
    stages = [PipelineStage(layers[index], index, 4, torch.device("cpu")) for index in held]
    runtime = _PipelineScheduleRuntime(stages, 4, loss_fn=nn.functional.mse_loss)
    runtime._load_csv(path)
    runtime.step(*((inputs,) if rank == 0 else ()), target=targets if rank == 0 else None)
    return max(
        (layers[index].weight.grad - expected[index]).abs().max().item()  # type: ignore[operator]
        for index in held
    )


def _gradients(
    layers: list[nn.Linear], inputs: torch.Tensor, targets: torch.Tensor
) -> list[torch.Tensor]:
    """Of the mean loss over four microbatches."""
    whole = nn.Sequential(*layers)
    for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
        nn.functional.mse_loss(whole(x), y).backward()
    gradients = [layer.weight.grad / 4 for layer in layers if layer.weight.grad is not None]
    whole.zero_grad()
    return gradients
