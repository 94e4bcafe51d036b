"""Activation checkpointing under schedules that split the backward."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

from ..case import Case, SymptomError, Thread
from ..meters import LiveBytes, Products
from ..schedules import MakeStage, Pipeline, split_stage

_MICROBATCHES = 4
_LAYERS = 6
_WIDTH = 32


class _Blocks(nn.Module):
    """Layers, all of which are one checkpointed region or none is."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(_LAYERS)]
        self.layers = nn.Sequential(*layers)
        self._checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if not self._checkpointed:
            found: Tensor = self.layers(x)
            return found
        output: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return output


def _pipeline(make: MakeStage, kind: str, *, checkpointed: bool) -> Pipeline:
    torch.manual_seed(0)
    stages = [_Blocks(checkpointed=checkpointed) for _ in range(4)]
    return Pipeline.of(kind, stages, make, _MICROBATCHES)


def _step(pipeline: Pipeline) -> None:
    x, y = torch.randn(2, 4 * 64, _WIDTH)
    pipeline.step(x, target=y)


def _work(make: MakeStage) -> str:
    pipeline = _pipeline(make, "ScheduleInterleavedZeroBubble", checkpointed=True)
    _step(pipeline)
    with Products() as products:
        _step(pipeline)
    each = products.count / (2 * _LAYERS * _MICROBATCHES)
    said = f"{each:.3g} matrix products a layer and microbatch, 4 with one recomputation"
    if each > 4:
        raise SymptomError(said)
    return said


def _memory(make: MakeStage) -> str:
    zero_bubble = _saved(make, "ScheduleInterleavedZeroBubble")
    fused = _saved(make, "ScheduleInterleaved1F1B")
    said = f"checkpointing saves {zero_bubble:.0%} of a step's peak, {fused:.0%} without the split"
    if zero_bubble < fused / 2:
        raise SymptomError(said)
    return said


def _saved(make: MakeStage, kind: str) -> float:
    """The share of a step's peak that checkpointing takes away."""
    peaks: list[int] = []
    for checkpointed in (True, False):
        pipeline = _pipeline(make, kind, checkpointed=checkpointed)
        _step(pipeline)
        with LiveBytes() as live:
            _step(pipeline)
        peaks.append(live.peak)
    return 1 - peaks[0] / peaks[1]


CASES = [
    Case(
        "zero-bubble-with-checkpointing-memory",
        (Thread("pytorch/pytorch", 136766),),
        "with checkpointing, zero bubble runs out of memory where 1F1B has plenty",
        functools.partial(_memory, PipelineStage),
        functools.partial(_memory, split_stage),
        seen="checkpointing saves",
    ),
    Case(
        "zero-bubble-with-checkpointing-time",
        (Thread("pytorch/torchtitan", 773),),
        "zero bubble is several times slower than 1F1B with checkpointing, not without",
        functools.partial(_work, PipelineStage),
        functools.partial(_work, split_stage),
        seen="matrix products a layer",
    ),
]
