"""torch's schedules, what is trained under them, and who runs them."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from autosplit.errors import ScheduleError
from autosplit.pipeline import PipelineTrainer
from autosplit.pipeline.builders.build import build as build_schedule
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.validation.torch_csv import read_csv
from autosplit.pipelining import SplitPipelineStage

Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One schedule.

    Attributes:
        name: as ``get_schedule_class`` takes it.
        schedule: torch's class.
        chunks: stages on each rank.
        v_shaped: rank r holds stages r and 2P - 1 - r, rather than every P-th one.
        split: whether it has I and W.
    """

    name: str
    schedule: Any
    chunks: int = 2
    v_shaped: bool = False
    split: bool = False


ENTRIES = {
    each.name: each
    for each in (
        Entry("GPipe", ScheduleGPipe, 1),
        Entry("1F1B", Schedule1F1B, 1),
        Entry("Interleaved1F1B", ScheduleInterleaved1F1B),
        Entry("LoopedBFS", ScheduleLoopedBFS),
        Entry("InterleavedZeroBubble", ScheduleInterleavedZeroBubble, split=True),
        Entry("ZBVZeroBubble", ScheduleZBVZeroBubble, v_shaped=True, split=True),
        Entry("DualPipeV", ScheduleDualPipeV, v_shaped=True, split=True),
    )
}


@dataclasses.dataclass(frozen=True)
class Task:
    """One contender's work on this rank.

    Attributes:
        entry: the schedule.
        microbatches: M.
        build: gives the module of a stage, always the same.
        loss_fn: the loss of one microbatch.
        batch: inputs and targets of a step.
        group: of the ranks, for messages.
        closing: what ends with the task.
    """

    entry: Entry
    microbatches: int
    build: Callable[[int], nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batch: tuple[Tensor, Tensor]
    group: dist.ProcessGroup
    closing: contextlib.ExitStack

    @property
    def stages(self) -> int:
        """Of all ranks."""
        return dist.get_world_size() * self.entry.chunks

    @property
    def held(self) -> list[int]:
        """This rank's stages."""
        rank = dist.get_rank()
        if self.entry.v_shaped:
            return [rank, self.stages - 1 - rank]
        return list(range(rank, self.stages, dist.get_world_size()))

    def run(self, stages: Sequence[PipelineStage]) -> Step:
        """A step of torch's schedule over these stages."""
        schedule = self.schedule_of(stages)
        args = self.batch[:1] if 0 in self.held else ()
        last = self.stages - 1 in self.held
        kwargs: dict[str, Any] = {"target": self.batch[1], "losses": []} if last else {}
        return lambda: schedule.step(*args, **kwargs)

    def schedule_of(self, stages: Sequence[PipelineStage]) -> Any:
        single = issubclass(self.entry.schedule, PipelineScheduleSingle)
        given = stages[0] if single else list(stages)
        return self.entry.schedule(given, self.microbatches, loss_fn=self.loss_fn)

    def stage(self, kind: Any, module: nn.Module, index: int, **options: Any) -> Any:
        return kind(module, index, self.stages, torch.device("cpu"), group=self.group, **options)

    def order(self) -> Schedule:
        """The same schedule for autosplit's engine: every rank's actions in torch's order.

        Of schedules with one stage a rank, torch's own order is only for show, and that of 1F1B
        is none that could run; ours by the same name runs the same.
        """
        if self.entry.chunks == 1:
            name = self.entry.name.lower()
            return build_schedule(name, self.stages, self.microbatches, split_backward=False)
        stages = [self.stage(PipelineStage, nn.Identity(), index) for index in self.held]
        orders: dict[int, list[Any]] | None = self.schedule_of(stages).pipeline_order
        if orders is None:
            raise ScheduleError(f"torch does not say in which order {self.entry.name} runs")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "order.csv"
            with path.open("w", newline="") as file:
                csv.writer(file).writerows(orders[rank] for rank in sorted(orders))
            return read_csv(path, name=self.entry.name)


def _stages(task: Task, kind: Any, *, compiled: bool = False, **options: Any) -> Step:
    modules = {index: task.build(index) for index in task.held}
    for module in modules.values() if compiled else ():
        module.compile()
    return task.run([task.stage(kind, each, at, **options) for at, each in modules.items()])


def _engine(task: Task) -> Step:
    trainer = PipelineTrainer(
        task.build,
        task.loss_fn,
        torch.optim.SGD,
        stages=task.stages,
        microbatches=task.microbatches,
        schedule=task.order(),
    )
    task.closing.enter_context(trainer)
    return lambda: trainer.forward_backward(task.batch)


TORCH = "torch, eager"
COMPILED = "torch, compiled"
UNDONATED = "torch, compiled, no donated buffers"
OURS = "ours, eager"
INDUCTOR = "ours, Inductor"
ENGINE = "our engine, eager"

_compiled = functools.partial(_stages, kind=PipelineStage, compiled=True)
CONTENDERS: dict[str, Callable[[Task], Step]] = {
    TORCH: functools.partial(_stages, kind=PipelineStage),
    COMPILED: _compiled,
    UNDONATED: _compiled,
    OURS: functools.partial(_stages, kind=SplitPipelineStage),
    INDUCTOR: functools.partial(_stages, kind=SplitPipelineStage, backend="inductor"),
    ENGINE: _engine,
}
INSTEAD = {UNDONATED: COMPILED}
"""Who runs only where another one has failed."""
