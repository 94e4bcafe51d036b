"""What a stage receives, and when."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from .. import gradients
from ..case import Absent, Case, SymptomError, Thread
from ..gradients import mean_square
from ..schedules import MakeStage, Pipeline, chunks, split_stage

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


class _Doubling(nn.Module):
    """Its hook changes the gradient that goes to the stage before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(_double)
        output: Tensor = self.layer(x)
        return output


def _double(grad: Tensor) -> Tensor:
    return 2 * grad


def _changed(make: MakeStage) -> str:
    torch.manual_seed(0)
    stages = [nn.Linear(8, 8), _Doubling()]
    pipeline = Pipeline.of("Schedule1F1B", stages, make, _MICROBATCHES)
    for _ in range(_STEPS):
        x, y = torch.randn(4, 8), torch.randn(4, 8)
        expected = gradients.plain(stages, chunks(_MICROBATCHES, x, y), mean_square)
        for stage in stages:
            stage.zero_grad()
        gradients.check(pipeline.step(x, target=y), expected)
    return f"a hook that doubles a gradient, over {_STEPS} steps, {gradients.EQUAL}"


CASES = [
    Case(
        "hooks-that-change-received-gradients",
        (Thread("pytorch/pytorch", 185331),),
        "hooks of earlier steps still stand on the reused receive buffers",
        functools.partial(_changed, PipelineStage),
        functools.partial(_changed, split_stage),
        seen="2 times plain autograd's",
        unsolved="registers a hook on a tensor",
    ),
    Case(
        "hooks-that-watch-received-activations",
        (Thread("pytorch/pytorch", 185331),),
        "hooks on a stage's input fire once more in every step",
        functools.partial(_run, PipelineStage),
        functools.partial(_run, split_stage),
        seen=r"fires \[3, 4, 6\]",
        unsolved="registers a hook on a tensor",
    ),
    Case(
        "receives-before-the-sends-of-others",
        (Thread("pytorch/pytorch", 188833),),
        "receives that are posted early hold up the sends behind them on the same stream",
        Absent("Gloo has no streams: a receive that waits holds up nothing"),
        Absent("Gloo has no streams: a receive that waits holds up nothing"),
    ),
]
