"""Stages that are compiled, under schedules that split the backward."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from .. import gradients
from ..case import Case, Thread
from ..gradients import mean_square
from ..schedules import V_SHAPED, MakeStage, Pipeline, chunks, split_stage

_MICROBATCHES = 4


def _run(make: MakeStage, *, compiled: bool) -> str:
    for kind in V_SHAPED:
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]
        x, y = torch.randn(8, 16), torch.randn(8, 16)
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
