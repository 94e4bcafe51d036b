"""Batches and microbatches of several shapes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from .. import gradients
from ..case import ENGINE, Case, Thread
from ..gradients import mean_square
from ..schedules import MakeStage, Pipeline, chunks, split_stage

_LENGTHS = (4, 6, 4)


def _stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]


def _batch(samples: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, length, 8), torch.randn(samples, length, 8)


def _lengths(*, ours: bool) -> str:
    """Steps of sequences of other lengths."""
    stages = _stages()
    batches = [_batch(4, length) for length in _LENGTHS]
    expected = [gradients.plain(stages, chunks(2, *batch), mean_square) for batch in batches]
    if ours:
        from ..training import Trainer

        with Trainer(stages, 2) as trainer:
            for batch, wanted in zip(batches, expected, strict=True):
                gradients.check(trainer.step(batch), wanted)
    else:
        pipeline = Pipeline.of("Schedule1F1B", stages, PipelineStage, 2)
        for (x, y), wanted in zip(batches, expected, strict=True):
            gradients.check(pipeline.step(x, target=y), wanted)
            for stage in stages:
                stage.zero_grad()
    return f"sequences of {_LENGTHS} tokens in three steps, {gradients.EQUAL}"


def _uneven(make: MakeStage) -> str:
    """Eight samples in three microbatches."""
    stages = _stages()
    x, y = _batch(8, 4)
    expected = gradients.plain(stages, chunks(3, x, y), mean_square)
    pipeline = Pipeline.of("Schedule1F1B", stages, make, 3)
    return gradients.check(pipeline.step(x, target=y), expected)


CASES = [
    Case(
        "sequences-of-several-lengths",
        (Thread("pytorch/pytorch", 159942), Thread("pytorch/torchtitan", 431)),
        "buffers have the shape of the first batch: a batch of another one fails",
        functools.partial(_lengths, ours=False),
        functools.partial(_lengths, ours=True),
        seen="gloo|rank . |[Ss]hape|size",
        by=ENGINE,
    ),
    Case(
        "microbatches-of-several-sizes",
        (Thread("pytorch/pytorch", 126600),),
        "a batch that the microbatches do not divide fails",
        functools.partial(_uneven, PipelineStage),
        functools.partial(_uneven, split_stage),
        seen="size of tensor|[Ss]hape",
    ),
]
