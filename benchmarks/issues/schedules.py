"""Steps of torch's schedules, over stages of torch or of autosplit: one line differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from . import gradients
from .gradients import Gradients, Loss, mean_square

CPU = torch.device("cpu")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")

MakeStage = Callable[..., PipelineStage]
"""As PipelineStage: (module, index, count, device)."""


def split_stage(*args: Any, **options: Any) -> PipelineStage:
    """autosplit's stage, which the ranks of stock torch do not import."""
    from autosplit.pipelining import SplitPipelineStage

    return SplitPipelineStage(*args, **options)


@dataclasses.dataclass
class Pipeline:
    """Stages of this rank under one of torch's schedules.

    Attributes:
        schedule: drives them.
        modules: those of this rank, by stage.
        count: stages in all.
    """

    schedule: Any
    modules: Mapping[int, nn.Module]
    count: int

    @classmethod
    def of(
        cls,
        kind: str,
        stages: Sequence[nn.Module],
        make: MakeStage,
        microbatches: int,
        loss_fn: Loss | None = mean_square,
        *,
        mine: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> Pipeline:
        """Stages under a schedule of torch.

        Args:
            kind: the name of its class.
            stages: all modules, of which this rank takes its own.
            make: what makes a stage.
            microbatches: M.
            loss_fn: of a microbatch.
            mine: which are this rank's; None: those that the schedule asks for.
            group: the pipeline's ranks; None: all.
            options: further ones of the schedule.
        """
        count = len(stages)
        mine = placed(kind, count, group) if mine is None else mine
        made = [make(stages[at], at, count, CPU, group=group) for at in mine]
        factory = getattr(schedules, kind)
        single = issubclass(factory, schedules.PipelineScheduleSingle)
        schedule = factory(made[0] if single else made, microbatches, loss_fn=loss_fn, **options)
        return cls(schedule, {at: stages[at] for at in mine}, count)

    def step(self, *inputs: Tensor, target: Tensor, **options: Any) -> Gradients:
        """Gradients of this rank's stages after a step of a batch."""
        args = inputs if 0 in self.modules else ()
        if self.count - 1 in self.modules:
            options["target"] = target
        self.schedule.step(*args, **options)
        return gradients.of(self.modules)


def placed(kind: str, count: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """The stages of this rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if kind in V_SHAPED:
        return [rank, count - 1 - rank]
    return list(range(rank, count, ranks))


def chunks(microbatches: int, *tensors: Tensor) -> list[tuple[Any, ...]]:
    """A batch, in microbatches."""
    return list(zip(*(tensor.chunk(microbatches) for tensor in tensors), strict=True))
