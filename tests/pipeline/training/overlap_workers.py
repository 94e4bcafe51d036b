"""Steps that do not wait at their end, for spawned processes."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.workers import data, trainer


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
