"""What a program is given: a schedule, this rank's stages of a model, and a batch."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build as build_schedule
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.validation.torch_csv import read_csv

from .schedules import Entry

Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """One contender's work on this rank.

    Attributes:
        entry: the schedule.
        rank: this process's.
        ranks: how many there are.
        microbatches: M.
        build: gives the module of a stage, always the same.
        loss_fn: the loss of one microbatch.
        batch: inputs and targets of a step.
        group: of the ranks, for messages.
        closing: what ends with the task.
    """

    entry: Entry
    rank: int
    ranks: int
    microbatches: int
    build: Callable[[int], nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batch: tuple[Tensor, Tensor]
    group: dist.ProcessGroup
    closing: contextlib.ExitStack

    @property
    def device(self) -> torch.device:
        """Where stages are."""
        return torch.device("cpu")

    @property
    def stages(self) -> int:
        """Of all ranks."""
        return self.ranks * self.entry.chunks

    @property
    def held(self) -> list[int]:
        """This rank's stages."""
        if self.entry.v_shaped:
            return [self.rank, self.stages - 1 - self.rank]
        return list(range(self.rank, self.stages, self.ranks))

    @property
    def args(self) -> tuple[Tensor, ...]:
        """Positional arguments of torch's ``step``: the first stage's inputs."""
        return self.batch[:1] if 0 in self.held else ()

    @property
    def kwargs(self) -> dict[str, Any]:
        """Its keyword arguments: the last stage's targets."""
        last = self.stages - 1 in self.held
        return {"target": self.batch[1], "losses": []} if last else {}

    def schedule_of(self, stages: Sequence[PipelineStage]) -> Any:
        """torch's schedule over these stages."""
        single = issubclass(self.entry.schedule, PipelineScheduleSingle)
        return self.entry.schedule(
            stages[0] if single else list(stages), self.microbatches, loss_fn=self.loss_fn
        )

    def order(self) -> Schedule:
        """The same schedule for autosplit's engine: every rank's actions in torch's order.

        Of schedules with one stage a rank, torch's own order is only for show, and that of 1F1B
        is none that could run; ours by the same name runs the same.
        """
        if self.stages == self.ranks:
            name = self.entry.name.lower()
            return build_schedule(name, self.stages, self.microbatches, split_backward=False)
        stages = [
            PipelineStage(nn.Identity(), index, self.stages, self.device, group=self.group)
            for index in self.held
        ]
        schedule = self.schedule_of(stages)
        orders: dict[int, list[Any]] | None = schedule.pipeline_order
        if orders is None:
            raise ScheduleError(f"torch does not say in which order {self.entry.name} runs")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "order.csv"
            with path.open("w", newline="") as file:
                csv.writer(file).writerows(orders[rank] for rank in sorted(orders))
            return read_csv(path, name=self.entry.name)
