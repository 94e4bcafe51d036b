"""Functions that tests of recorded memory run on each rank."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.ledger.bands import StepMemory
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.stage import Stage
from autosplit.trainer.trainer import PipelineTrainer
from tests.pipeline import workers
from tests.trainer.late_transfers import late_transfers, recorded_transfers
from tests.trainer.moving import SAVED, awaiting, evicting, offloading
from tests.zoo import Residual

WIDTH, ROWS, MICROBATCHES = 32, 16, 4
LARGEST = ROWS * 3 * WIDTH * 4
"""Bytes of the largest storage that a block saves."""


def block() -> Residual:
    return Residual(WIDTH, 3 * WIDTH)


class Convolutions(nn.Module):
    """Kernels that take memory of their own: for convolutions, and operands of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.scale = nn.Parameter(torch.ones(2, 1, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.convolution(x.reshape(-1, 2, 4, WIDTH // 8))) * self.scale
        return x + torch.softmax(y.reshape(x.shape).float(), 0)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """As ``mse_loss``, whose kernel puts the scalar into memory as large as the output."""
    return (output - target).square().mean()


def running_again() -> Schedule:
    """Of one rank, whose forwards are all run again before their backwards."""
    plain = build("gpipe", 2, MICROBATCHES, ranks=1)
    rows = []
    for action in plain.ranks[0]:
        if action.kind is ActionKind.BACKWARD_INPUT:
            rows.append(replace(action, kind=ActionKind.RECOMPUTE))
        rows.append(action)
    return replace(plain, ranks=(tuple(rows),))


def batch() -> tuple[Tensor, Tensor]:
    rows = ROWS * MICROBATCHES
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    one, other = torch.randn(2, rows, WIDTH, generator=generator)
    return one.clone(), other.clone()


def trainer(
    stages: int = 2,
    block: Callable[[], nn.Module] = block,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = mean_square,
    frozen: int | None = None,
    **options: Any,
) -> PipelineTrainer:
    torch.manual_seed(0)
    inputs = {"loss_fn": loss_fn, "optimizer_fn": torch.optim.AdamW, "stage_factory": None}
    return workers.trainer(
        lambda index: block().requires_grad_(index != frozen),
        stages,
        MICROBATCHES,
        **{**inputs, **options},
    )


def leaking(kept: list[Tensor], size: int) -> Callable[..., Stage]:
    """Makes stages that keep so many bytes for good at each forward."""

    class Leaking(Stage):
        def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
            kept.append(torch.empty(size, dtype=torch.uint8))
            return super().forward(microbatch, inputs)

    return Leaking


@contextlib.contextmanager
def recorded_step(**options: Any) -> Iterator[PipelineTrainer]:
    """A trainer after a recorded step. Its first step, which makes state and buffers, is not
    recorded; the prediction before it must be the same as the one after.
    """
    with trainer(**options) as engine:
        early = engine.predict_memory(batch())
        if engine.record or early.peak_activations or early.bands:
            raise AssertionError("expected a prediction before anything was measured")
        engine.step(batch())
        engine.record = "memory"
        gc.collect()  # else old garbage is freed within the step
        gc.disable()
        try:
            engine.step(batch())
        finally:
            gc.enable()
        memory = engine.memory()
        same = (early.predicted, early.fixed) == (memory.predicted, memory.fixed)
        if not (same or None in memory.predicted):
            raise AssertionError(f"predicted {early}, later {memory.predicted}, {memory.fixed}")
        yield engine


def recorded(**options: Any) -> StepMemory:
    """The memory of such a step."""
    with recorded_step(**options) as engine:
        return engine.memory()


def predicted_levels(engine: PipelineTrainer) -> dict[str, int]:
    """Bytes that are predicted beside fixed ones, by action of a single rank."""
    memory, (row,) = engine._runner.memory, engine.schedule.ranks
    levels = memory.levels(engine.schedule)
    if levels is None:
        raise AssertionError("expected a prediction")
    return {str(at): memory.batch_bytes + level for at, level in zip(row, levels, strict=True)}


def early_and_late(steps: int) -> tuple[StepMemory, StepMemory]:
    """The memory of the third step, and of one many steps later."""
    with trainer() as engine:
        results = []
        for step in range(steps):
            engine.record = "memory" if step in (2, steps - 1) else False
            if engine.record:  # a collection must not fall into the step
                gc.collect()
                gc.disable()
            engine.step(batch())
            gc.enable()
            if engine.record:
                results.append(engine.memory())
        return results[0], results[1]


def stayed_offloaded(folder: str) -> tuple[StepMemory, StepMemory]:
    """A step as it is, and with microbatches in a file. What leaves is seen to."""
    plain = build("gpipe", 2, MICROBATCHES)
    with recorded_transfers():
        return (
            recorded(schedule=plain),
            recorded(schedule=offloading(plain, away=[SAVED]), store=folder),
        )


def moved_late(folder: str) -> list[StepMemory]:
    """Steps with moves of all kinds, whose transfers take no time, or long."""
    plain, late = build("gpipe", 2, MICROBATCHES), build("1f1b", 2, MICROBATCHES, weights="2bp")
    with late_transfers(0.0):
        results = [
            recorded(schedule=evicting(late, range(2))),
            recorded(schedule=offloading(plain), store=folder),
        ]
    with late_transfers(0.01):
        results += [
            recorded(schedule=evicting(plain, range(2))),
            recorded(schedule=awaiting(offloading(late)), store=folder),
        ]
    return results
