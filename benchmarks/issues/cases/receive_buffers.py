"""What a stage receives, and when."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ..case import Absent, Case, SymptomError, Thread
from ..schedules import MakeStage, Pipeline, split_stage

_MICROBATCHES = 2
_STEPS = 3


class _Watched(nn.Module):
    """Registers a hook on what it is given, as those do who look at activations' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.fired = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self._count)
        output: Tensor = self.layer(x)
        return output

    def _count(self, grad: Tensor) -> None:
        self.fired += 1


def _run(make: MakeStage) -> str:
    torch.manual_seed(0)
    stages: list[Any] = [nn.Linear(8, 8), _Watched()]
    pipeline = Pipeline.of("Schedule1F1B", stages, make, _MICROBATCHES)
    fired = []
    for _ in range(_STEPS):
        before = stages[1].fired
        pipeline.step(torch.randn(4, 8), target=torch.randn(4, 8))
        fired.append(stages[1].fired - before)
    if 1 not in pipeline.modules:
        return ""
    said = f"a hook on the input of a stage fires {fired} times in {_STEPS} steps of 2 microbatches"
    if set(fired[1:]) != {_MICROBATCHES}:
        raise SymptomError(said)
    return said


CASES = [
    Case(
        "hooks-on-received-activations",
        (Thread("pytorch/pytorch", 185331),),
        "receive buffers are reused, so hooks on a stage's input add up from step to step",
        functools.partial(_run, PipelineStage),
        functools.partial(_run, split_stage),
        seen=r"fires \[3, 4, 6\]",
    ),
    Case(
        "receives-before-the-sends-of-others",
        (Thread("pytorch/pytorch", 188833),),
        "receives that are posted early hold up the sends behind them on the same stream",
        Absent("Gloo has no streams: a receive that waits holds up nothing"),
        Absent("Gloo has no streams: a receive that waits holds up nothing"),
    ),
]
