"""One stage's part in a step of torch's runtime: what is known of the schedule, and scaling."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import PipelineError
from autosplit.runtime.gradient_graphs import Call
from autosplit.torch_internals.ddp_reducer import average_gradients
from autosplit.torch_internals.pipelining.schedules import (
    RunningSchedule,
    action_lists,
    described,
    run_microbatches_by,
    running_schedule,
)

from .action_plan import ActionPlan
from .first_failure import FirstFailure
from .gradient_scaling import StepGradients

if TYPE_CHECKING:
    from .stage import SplitPipelineStage


class StageStep:
    """What one stage knows of the step that runs.

    Args:
        stage: the stage.

    Attributes:
        gradients: those of the step, shared by the stages of one rank.
    """

    def __init__(self, stage: SplitPipelineStage) -> None:
        self._stage = weakref.ref(stage)
        self._schedule: Any = None
        self._lists: Any = None
        self._running: RunningSchedule | None = None
        self._plan = ActionPlan()
        self._apart = self._mixed = self._ended = False
        self._parameters: Sequence[Tensor] = ()
        self.gradients = StepGradients()

    def begin(self) -> None:
        """Find the schedule, and keep its gradients apart from earlier ones where it scales."""
        schedule = running_schedule()
        self._find(schedule)
        self._ended = False
        if not self._of.has_backward:
            return
        running = self._running
        self._parameters = self._of.sharding.owners(self._of.parameters())
        # As torch does: actions without REDUCE_GRAD, read from a file of them, divide nothing.
        reduces = running is not None and self._of.stage_index in running.reduces
        self._apart = running is not None and running.scales and reduces
        self._mixed = running is None and any(p.grad is not None for p in self._parameters)
        if running is None:
            return
        ours = [each for each in running.stages if hasattr(each, "step_gradients")]
        if ours[0] is self._of:
            self.gradients.abandon()
        else:
            self.gradients = ours[0].step_gradients
        if self._apart:
            self.gradients.begin(self._parameters)

    def end(self) -> None:
        """Everything was added: have it averaged where data parallelism is to, and reduced where
        the schedule will not ask for that.
        """
        running, module = self._running, self._of.submod
        if isinstance(module, DistributedDataParallel):
            average_gradients(module)
        if running is None or self._of.stage_index not in running.reduces:
            self._of.sharding.reduce()

    def scale(self, factor: int) -> None:
        """Divide what this step added.

        Raises:
            PipelineError: it cannot be told from what was there before.
        """
        if not self._of.has_backward:  # torch's runtime asks in an evaluation, too
            return
        if self._apart:
            if not self._ended:
                self._ended = True
                self.gradients.scale(self._parameters, factor)
        elif self._mixed and factor != 1:
            raise PipelineError(
                f"stage {self._of.stage_index}: gradients are to be divided by {factor}, but it "
                "was not told by a schedule's step() that they would be, so those of earlier steps "
                "are among them. Set them to None before, or run the schedule by step()"
            )
        elif factor != 1:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(factor)

    def _check_placement(self) -> None:
        """Refuse a schedule that puts this stage on another rank, or cannot run it.

        Raises:
            PipelineError: names the stages that belong here.
        """
        running, stage = self._running, self._of
        if running is None:
            return
        if running.single and stage.group_size != stage.num_stages:
            raise PipelineError(
                f"{running.name} runs one stage a rank: {stage.num_stages} stages need a process "
                f"group of {stage.num_stages}, got one of {stage.group_size}"
            )
        expected = [s for s, rank in sorted(running.placement.items()) if rank == stage.group_rank]
        held = sorted(each.stage_index for each in running.stages)
        if not running.single and held != expected:
            raise PipelineError(
                f"{running.name} has stages {expected} on rank {stage.group_rank} of "
                f"{stage.group_size}, which was given {held}"
            )

    def calls(self) -> list[Call]:
        """The calls of this stage's graphs in one step, in their order."""
        stage = self._of
        return self._plan.calls(stage.stage_index, joined=stage.joins_weights)

    def fuses(self, chunk: int) -> bool:
        """Whether I of this microbatch runs with its W, as B."""
        return (self._of.stage_index, chunk) in self._plan.fused

    def joins(self, chunk: int) -> bool:
        """Whether W of this microbatch may wait for the next action, which is W of this stage."""
        return (self._of.stage_index, chunk) in self._plan.joined

    @property
    def _of(self) -> SplitPipelineStage:
        stage = self._stage()
        if stage is None:
            raise PipelineError("the stage of this step is gone")
        return stage

    def _find(self, schedule: Any) -> None:
        known = self._schedule() if self._schedule is not None else None
        if schedule is None:
            self._schedule, self._running, self._plan = None, None, ActionPlan()
        elif known is not schedule or self._lists is not action_lists(schedule):
            self._schedule = weakref.ref(schedule)
            self._lists = action_lists(schedule)
            self._running = described(schedule)
            self._check_placement()
            self._plan = ActionPlan.of(self._running, self._of.group_rank)
            failure = FirstFailure(self._running.name, self._of.group, self._neighbours())
            run_microbatches_by(schedule, failure.run)

    def _neighbours(self) -> Iterator[int]:
        """Global ranks that have a stage next to one of this rank."""
        running, group = self._running, self._of.group or dist.group.WORLD
        if running is None or group is None:
            return
        for stage in running.stages:
            for at in (stage.stage_index - 1, stage.stage_index + 1):
                if at in running.placement:
                    yield dist.get_global_rank(group, running.placement[at])
