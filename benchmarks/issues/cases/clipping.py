"""Clipping the norm of a gradient that several ranks hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from .. import gradients
from ..case import ENGINE, Case, Thread
from ..gradients import Gradients, mean_square
from ..schedules import Pipeline, chunks

_MICROBATCHES = 4
_NORM = 0.01


def _setting() -> tuple[list[nn.Module], Tensor, Tensor, Gradients]:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    expected = gradients.plain(stages, chunks(_MICROBATCHES, x, y), mean_square)
    grads = [grad for grad in expected.values() if grad is not None]
    factor = _NORM / float(torch.nn.utils.get_total_norm(grads))
    return (
        stages,
        x,
        y,
        {name: None if grad is None else grad * factor for name, grad in expected.items()},
    )


def _stock() -> str:
    stages, x, y, expected = _setting()
    pipeline = Pipeline.of("Schedule1F1B", stages, PipelineStage, _MICROBATCHES)
    pipeline.step(x, target=y)
    mine = [p for module in pipeline.modules.values() for p in module.parameters()]
    torch.nn.utils.clip_grad_norm_(mine, _NORM)
    return gradients.check(gradients.of(pipeline.modules), expected)


def _ours() -> str:
    from ..training import Trainer

    stages, x, y, expected = _setting()
    with Trainer(stages, _MICROBATCHES, max_grad_norm=_NORM) as trainer:
        gradients.check(trainer.step((x, y)), expected, tolerance=1e-4)
    return "max_grad_norm= clips by the norm of all stages"


CASES = [
    Case(
        "clipping-by-the-whole-model-norm",
        (Thread("pytorch/pytorch", 162638),),
        "no schedule clips; clip_grad_norm_ on each rank knows its own stages only",
        _stock,
        _ours,
        seen="the gradient of .* times",
        by=ENGINE,
    ),
]
