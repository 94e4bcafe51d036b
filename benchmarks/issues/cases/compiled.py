"""Stages that are compiled, under schedules that split the backward."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from .. import gradients
from ..case import Case, Thread
from ..gradients import mean_square
from ..schedules import V_SHAPED, MakeStage, Pipeline, chunks, split_stage

_MICROBATCHES = 4


class _Gated(nn.Module):
    """A feed-forward block as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return output


def _run(make: MakeStage, *, compiled: bool) -> str:
    for kind in V_SHAPED:
        torch.manual_seed(0)
        stages = [_Gated() for _ in range(4)]
        x, y = torch.randn(8, 4, 16), torch.randn(8, 4, 16)
        expected = gradients.plain(stages, chunks(_MICROBATCHES, x, y), mean_square)
        if compiled:  # in place, as torchtitan does
            for stage in stages:
                stage.compile()
        pipeline = Pipeline.of(kind, stages, make, _MICROBATCHES)
        gradients.check(pipeline.step(x, target=y), expected, tolerance=1e-4)
    return f"ZBV and DualPipeV compiled by Inductor, {gradients.EQUAL}"


CASES = [
    Case(
        "zero-bubble-compiled",
        (Thread("pytorch/pytorch", 161904),),
        "ZBV and DualPipeV raise in the first backward of a compiled stage",
        functools.partial(_run, PipelineStage, compiled=True),
        functools.partial(_run, functools.partial(split_stage, backend="inductor"), compiled=False),
        seen="donated buffers",
    ),
]
