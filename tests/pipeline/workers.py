"""Functions that tests run in spawned processes, and the small models they train."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.trainer.trainer import PipelineTrainer
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.trainer_options import grouped

WIDTH = 6


def block(index: int) -> nn.Module:
    """Stage ``index``, the same on every call."""
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Tied(nn.Module):
    """One end of a model whose ends share a weight."""

    def __init__(self, index: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(50 + index)
        self.tied = nn.Parameter(torch.randn(width, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.tied))


def data(rows: int, seed: int = 100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return (
        torch.randn(rows, WIDTH, generator=generator),
        torch.randn(rows, WIDTH, generator=generator),
    )


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def trainer(
    model: Any = block, stages: int | None = 2, microbatches: int = 4, **options: Any
) -> PipelineTrainer:
    options = {"timeout": 60.0, "stage_factory": ReferenceStage, **options}
    if not callable(model):
        stages = None
    return PipelineTrainer(
        model,
        options.pop("loss_fn", F.mse_loss),
        options.pop("optimizer_fn", sgd),
        stages=stages,
        microbatches=microbatches,
        **grouped(**options),
    )


def single_process(model: nn.Module, inputs: Tensor, targets: Tensor, microbatches: int) -> Tensor:
    """Losses per microbatch; the gradients of their mean are left in ``.grad``."""
    losses = []
    for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        loss = F.mse_loss(model(x), y)
        torch.autograd.backward(loss / microbatches)
        losses.append(loss.detach())
    return torch.stack(losses)


def whole(stages: int) -> nn.Sequential:
    return nn.Sequential(*[block(index) for index in range(stages)])


def gradients_equal(mine: dict[int, dict[str, Tensor]], model: nn.Sequential) -> bool:
    """Whether a rank's gradients are bit for bit those of the whole model."""
    for stage, grads in mine.items():
        expected = {name: p.grad for name, p in model[stage].named_parameters()}
        if grads.keys() != expected.keys():
            return False
        for name, grad in grads.items():
            other = expected[name]
            if other is None or not torch.equal(grad, other):
                return False
    return True


def identify(factor: int) -> tuple[int, int, str, int]:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    environment = " ".join(f"{key}={os.environ[key]}" for key in keys)
    return dist.get_rank() * factor, int(total), environment, torch.get_num_threads()


def note_pid(folder: Path) -> None:
    (folder / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))


def fail(folder: Path, how: str) -> None:
    """Rank 1 ends in some way while rank 0 waits for it."""
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        ENDS[how]()
    dist.recv(torch.zeros(1), src=1)


def _raise() -> None:
    raise ValueError("bad weather")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep() -> None:
    time.sleep(600)


def _nap() -> None:
    time.sleep(4)


def _exhaust() -> None:
    """Ask for more memory than the process may have."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    earlier = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, earlier[1]))
    try:
        torch.zeros(2**28)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, earlier)


ENDS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "kill": _kill,
    "sleep": _sleep,
    "nap": _nap,
    "exhaust": _exhaust,
}


def outcomes(scenarios: Mapping[str, Callable[[], object]]) -> dict[str, tuple[str, str]]:
    """Type and text of the error in each scenario, one after another in one process group."""
    results = {}
    for name, scenario in scenarios.items():
        try:
            scenario()
        except Exception as error:
            results[name] = type(error).__name__, str(error)
        else:
            results[name] = "nothing", ""
        dist.barrier()
    return results


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, through dictionaries and lists."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
