"""Tensors that skip a stage."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline, schedules

from .. import gradients
from ..case import ENGINE, Case, Thread
from ..gradients import mean_square
from ..schedules import CPU, chunks

_MICROBATCHES = 4


class _Skipping(nn.Module):
    """The first layer's output is used by the second and the last."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x).tanh()
        for layer in self.layers[1:-1]:
            x = layer(x).tanh()
        output: Tensor = self.layers[-1](x) + first
        return output


def _model(stages: int) -> tuple[_Skipping, Tensor, Tensor]:
    torch.manual_seed(0)
    return _Skipping(stages), torch.randn(8, 8), torch.randn(8, 8)


def _stock(kind: str, stages: int) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, x, y = _model(stages)
    expected = gradients.plain([model], chunks(_MICROBATCHES, x, y), mean_square)
    split = {f"layers.{at}": SplitPoint.BEGINNING for at in range(1, stages)}
    pipe = pipeline(model, mb_args=(x.chunk(_MICROBATCHES)[0],), split_spec=split)
    own = range(rank, stages, ranks)
    made = [pipe.build_stage(at, CPU) for at in own]
    factory: Any = getattr(schedules, kind)
    single = issubclass(factory, schedules.PipelineScheduleSingle)
    schedule = factory(made[0] if single else made, _MICROBATCHES, loss_fn=mean_square)
    options = {"target": y} if stages - 1 in own else {}
    schedule.step(*((x,) if 0 in own else ()), **options)
    found = {f"0.{n}": p.grad for each in made for n, p in each.submod.named_parameters()}
    return gradients.check(found, expected)


def _ours(schedule: str, stages: int) -> str:
    import autosplit

    from ..training import Trainer

    model, x, y = _model(stages)
    expected = gradients.plain([model], chunks(_MICROBATCHES, x, y), mean_square)
    plan = autosplit.partition(
        model,
        (x.chunk(_MICROBATCHES)[0],),
        cut_at=[f"layers.{at}" for at in range(1, stages)],
        microbatches=_MICROBATCHES,
        schedule=schedule,
        ranks=dist.get_world_size(),
        costs="estimate",
    )
    named = gradients.named({0: model})
    with Trainer(plan, _MICROBATCHES, named=named, schedule=schedule) as trainer:
        return gradients.check(trainer.step((x, y)), expected)


CASES = [
    Case(
        "skip-connections-1f1b",
        (Thread("pytorch/pytorch", 127964),),
        "a tensor that two later stages use cannot be trained",
        functools.partial(_stock, "Schedule1F1B", 3),
        functools.partial(_ours, "1f1b", 3),
        seen="skip connections",
        by=ENGINE,
        ranks=3,
    ),
    Case(
        "skip-connections-several-stages-a-rank",
        (Thread("pytorch/pytorch", 179279),),
        "schedules with several stages a rank assume neighbours",
        functools.partial(_stock, "ScheduleInterleaved1F1B", 4),
        functools.partial(_ours, "interleaved", 4),
        seen="skip connections|non-adjacent",
        by=ENGINE,
    ),
]
