"""By what gradients are divided."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from .. import gradients
from ..case import ENGINE, Case, Thread
from ..gradients import mean_square
from ..schedules import MakeStage, Pipeline, chunks, split_stage

_MICROBATCHES = 4
_IGNORED = -100


def _summed(output: Tensor, labels: Tensor) -> Tensor:
    found: Tensor = nn.functional.cross_entropy(
        output.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED, reduction="sum"
    )
    return found


def _tokens() -> tuple[list[nn.Module], Tensor, Tensor, gradients.Gradients]:
    """Sequences of several lengths, padded, and gradients of the mean over all their tokens."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Embedding(16, 8), nn.Linear(8, 16)]
    ids, labels = torch.randint(16, (8, 5)), torch.randint(16, (8, 5))
    for row, length in enumerate((5, 1, 2, 3, 5, 4, 2, 1)):
        labels[row, length:] = _IGNORED
    count = float((labels != _IGNORED).sum())

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return _summed(output, target) / count

    return stages, ids, labels, gradients.plain(stages, [(ids, labels)], mean)


def _tokens_stock() -> str:
    """As torchtitan wires it: the loss sums, and is divided where it is logged."""
    stages, ids, labels, expected = _tokens()
    pipeline = Pipeline.of(
        "Schedule1F1B", stages, PipelineStage, _MICROBATCHES, _summed, scale_grads=False
    )
    return gradients.check(pipeline.step(ids, target=labels), expected)


def _tokens_ours() -> str:
    from ..training import Trainer

    stages, ids, labels, expected = _tokens()
    share = ((labels != _IGNORED).sum() / _MICROBATCHES).expand(len(labels))

    def loss(output: Tensor, target: Any) -> Tensor:
        part, tokens = target
        found: Tensor = _summed(output, part) / tokens[0]
        return found

    with Trainer(stages, _MICROBATCHES, loss) as trainer:
        gradients.check(trainer.step((ids, (labels, share))), expected)
    return f"targets carry the batch's tokens to the loss, {gradients.EQUAL}"


def _accumulated(make: MakeStage) -> str:
    """Two steps without zero_grad() between them."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    once = gradients.plain(stages, chunks(_MICROBATCHES, x, y), mean_square)
    twice = {name: None if grad is None else 2 * grad for name, grad in once.items()}
    pipeline = Pipeline.of("Schedule1F1B", stages, make, _MICROBATCHES)
    pipeline.step(x, target=y)
    return gradients.check(pipeline.step(x, target=y), twice)


CASES = [
    Case(
        "gradients-per-token",
        (Thread("pytorch/torchtitan", 2972),),
        "with a pipeline gradients are as many times larger as a batch has tokens",
        _tokens_stock,
        _tokens_ours,
        seen="the gradient of .* times",
        by=ENGINE,
    ),
    Case(
        "gradients-accumulated-over-steps",
        (Thread("pytorch/torchtitan", 1733),),
        "every step divides by M what earlier steps have accumulated: a moving average, no sum",
        functools.partial(_accumulated, PipelineStage),
        functools.partial(_accumulated, split_stage),
        seen="0.625 times",
    ),
]
