"""What tests of recorded memory run on each rank."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.pipeline.ledger.bands import StepMemory
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.stage import Stage

WIDTH, ROWS, MICROBATCHES = 32, 16, 4


class Block(nn.Module):
    """Matrix products, a norm and an activation, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """As ``mse_loss``, whose kernel puts the scalar into memory as large as the output."""
    return (output - target).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    rows = ROWS * MICROBATCHES
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, rows, WIDTH, generator=generator)
    return one.clone(), other.clone()


def trainer(stages: int = 2, **options: Any) -> PipelineTrainer:
    torch.manual_seed(0)
    return PipelineTrainer(
        lambda index: Block(),
        mean_square,
        torch.optim.AdamW,
        stages=stages,
        microbatches=MICROBATCHES,
        timeout=60.0,
        **options,
    )


def leaking(kept: list[Tensor], size: int) -> Callable[..., Stage]:
    """Makes stages that keep so many bytes for good at each forward."""

    class Leaking(Stage):
        def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
            kept.append(torch.empty(size, dtype=torch.uint8))
            return super().forward(microbatch, inputs)

    return Leaking


def recorded(**options: Any) -> StepMemory:
    """The memory of a step like any other: the first one makes state and buffers."""
    with trainer(**options) as engine:
        engine.step(batch())
        engine.record = "memory"
        gc.collect()  # of what was before: its end is not the step's
        gc.disable()
        try:
            engine.step(batch())
        finally:
            gc.enable()
        return engine.memory()


def early_and_late(steps: int) -> tuple[StepMemory, StepMemory]:
    """The memory of the third step, and of one many steps later."""
    with trainer() as engine:
        found = []
        for step in range(steps):
            engine.record = "memory" if step in (2, steps - 1) else False
            if engine.record:  # what is garbage is not to depend on when it is collected
                gc.collect()
                gc.disable()
            engine.step(batch())
            gc.enable()
            if engine.record:
                found.append(engine.memory())
        return found[0], found[1]
