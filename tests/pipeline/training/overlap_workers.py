"""Steps whose waits are filled, for spawned processes: early weights, steps that do not wait."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.stage import Stage
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.workers import block, data, gradients_equal, single_process, trainer


class LateSecond(ReferenceStage):
    """Stage 1 takes 150 ms for a forward, so that rank 0 waits."""

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        if self.index == 1:
            time.sleep(0.15)
        return super().forward(microbatch, inputs)


def sliced_first(module: nn.Module, args: list[Tensor], *, index: int) -> Any:
    """Stage 0 can run its weight gradients in two parts, stage 1 is late."""
    if index == 1:
        return LateSecond(module, args, index=index)
    return Stage(module, args, index=index, slices=2)


def pair(index: int) -> nn.Sequential:
    return nn.Sequential(*block(index), *block(index + 2))


def early_weights(factory: Any) -> tuple[list[str], bool]:
    """What rank 0 ran, and whether the gradients are those of one process."""
    inputs, targets = data(8)
    model = nn.Sequential(pair(0), pair(1))
    single_process(model, inputs, targets, 4)
    with trainer(
        pair, record=True, weights="2bp", early_weights=True, stage_factory=factory
    ) as engine:
        engine.forward_backward((inputs, targets))
        same = gradients_equal(engine.gradients(), model)
        row = [str(span.action) for span in engine.timeline().spans if span.rank == 0]
    return row, same


class SlowWeight(ReferenceStage):
    """Stage 1 takes 50 ms for a weight gradient."""

    def backward_weight(self, microbatch: int) -> None:
        if self.index == 1:
            time.sleep(0.05)
        super().backward_weight(microbatch)


def asynchronous(first: int = 0, **more: Any) -> dict[str, bool]:
    """Five steps that do not wait at their end, those from ``first`` on, against five of 1F1B that
    do.
    """
    batches = [data(8, seed=step) for step in range(5)]
    options: dict[str, Any] = {"weights": "2bp", "stage_factory": SlowWeight, **more}
    with trainer(**{**options, "schedule": "1f1b"}) as engine:
        expected = [engine.step(batch) for batch in batches]
        state = engine.state_dict()
    ends, steps = [], []
    with trainer(**options) as engine:
        for batch in batches:
            steps.append(engine.step_async(batch))
            ends.append(time.monotonic())
        losses = [step.wait() for step in steps]
        mine = engine.state_dict()
    rows: list[Any] = [None, None]
    dist.all_gather_object(rows, ends[first:])
    return {
        "losses": all(map(torch.equal, losses, expected)),
        "weights": all(
            torch.equal(value, state[index][name])
            for index, values in mine.items()
            for name, value in values.items()
        ),
        "ahead": all(first < second - 0.04 for first, second in zip(*rows, strict=True)),
    }
