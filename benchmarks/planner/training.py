"""Training steps of a way to cut: alone, and beside another way."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from autosplit.errors import PipelineError
from autosplit.pipeline import RunOptions
from autosplit.pipeline.schedule.schedule import ActionKind
from autosplit.pipeline.simulation.simulate import median_durations
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.cuts import Solution
from autosplit.planner.cutting import cut
from autosplit.trainer.trainer import PipelineTrainer

from ..pipeline.turns import forget
from .models import Subject

WARM_UP = 2


class Training:
    """A trainer over one way to cut."""

    def __init__(
        self, subject: Subject, whole: WholeModel, plan: Solution, microbatches: int
    ) -> None:
        self._subject = subject
        self._whole = whole
        self._size = microbatches * subject.microbatch_size
        self._firsts = plan.firsts
        self._steps = 0
        self.trainer = PipelineTrainer(
            cut(whole, self._firsts),
            subject.loss_fn,
            lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            microbatches=microbatches,
            schedule=plan.schedule,
            run_options=RunOptions(record=True),
        )

    @property
    def cuts(self) -> list[str]:
        """The name of the first block of every stage but the first."""
        return [self._whole.blocks[first].name for first in self._firsts]

    def step(self) -> float:
        """Seconds of one step with its gradients, without the optimizer's update."""
        batch = self._subject.batch_fn(self._steps, self._size)
        self._steps += 1
        dist.barrier()
        start = time.perf_counter()
        losses = self.trainer.forward_backward(batch)
        seconds = time.perf_counter() - start
        forget(self.trainer.modules.values())
        if not torch.isfinite(losses).all():
            raise PipelineError(f"a loss of {losses.tolist()}")
        return seconds

    def measured(self, steps: int) -> dict[str, Any]:
        """Seconds of so many steps, and medians of F, I and W of each stage in them."""
        for _ in range(WARM_UP):
            self.step()
        seconds, spans = [], []
        for _ in range(steps):
            seconds.append(self.step())
            spans.append(self.trainer.timeline().spans)
        medians = median_durations(spans)
        times = [
            [medians.get((stage, ActionKind(kind)), 0.0) for kind in "FIW"]
            for stage in range(len(self._firsts) + 1)
        ]
        return {"seconds": seconds, "times": times}
