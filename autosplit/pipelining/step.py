"""A step of one of torch's schedules: one rank's part in it, and in that one stage's.

Stages agree on shapes before the first microbatch. A rank that fails inside of a step: its
neighbours raise too, and say why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.schedule.schedule import BACKWARDS, Action
from autosplit.ranks.fault_store import Fault, FaultStore
from autosplit.ranks.first_error import RankError
from autosplit.ranks.groups import disconnect
from autosplit.runtime.specializations import CallSignature, flatten
from autosplit.torch_internals.autograd import call_accumulate_hooks
from autosplit.torch_internals.distributed import store_of
from autosplit.torch_internals.pipelining_schedules import (
    action_lists,
    describe_schedule,
    install_runner,
    reduces_gradients,
    running_schedule,
)
from autosplit.torch_internals.pipelining_stage import RuntimeStage

from .agreement import Agreement

if TYPE_CHECKING:
    from autosplit.pipelining.stage import SplitPipelineStage


class ScheduleSteps:
    """One rank's steps of one of torch's schedules: its stages agree before the first microbatch,
    and where a rank's step raises, all ranks end.

    The rank leaves its error in the store of the process group and closes its connections to the
    neighbouring stages, which would wait for its messages. Their waits end, they find the error,
    and close theirs. Over other backends than Gloo connections stay open: the neighbours' waits end
    at the group's timeout, and then say the same.

    Args:
        schedule: of torch's.
        run: runs its microbatches.

    Attributes:
        running: what is known of it.
        hooked: parameters of the step whose hooks of ``register_post_accumulate_grad_hook`` are
            called in its end, when gradients are whole and divided.
    """

    def __init__(self, schedule: Any, run: Callable[..., Any]) -> None:
        self._schedule, self._run = weakref.ref(schedule), run
        self._lists: Any = self  # not the schedule's
        self._ended: Fault | None = None
        self._given: tuple[Any, Any, Any] | None = None
        self._inputs: list[CallSignature] = []
        self.hooked: list[Tensor] = []
        self._due: Agreement | None = None
        self._agreement: Agreement | None = None
        self._connected = self._agreeing = False
        self.look()

    def divides(self, stage: SplitPipelineStage) -> bool:
        """Whether the step divides the gradients of a stage itself."""
        ends = reduces_gradients(self._schedule()) or not stage.sharding.groups
        return self.running.scales and ends and stage.stage_index in self.running.reduces

    def __call__(
        self,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        *rest: Any,
        **more: Any,
    ) -> Any:
        """Run a step's microbatches, in the place of the schedule's own method.

        Raises:
            RankError: another rank failed; with its error and traceback.
            NeighbourError: another rank failed before the first microbatch. The next step may go
                well.
            PipelineError: a step has failed before.
            Exception: as it was raised on this rank.
        """
        if self._ended is not None:
            raise PipelineError(
                f"{self.running.name} has ended, as {self._ended.headline}. Its process group has "
                "no connections any more: start anew, from a checkpoint, with new process groups"
            )
        count = self.running.microbatches
        self._given = arg_mbs or [()] * count, kwarg_mbs or [{}] * count, target_mbs
        self._agreeing, self.hooked = False, []
        try:
            self._begin_agreement()
            given = arg_mbs, kwarg_mbs, target_mbs
            result = self._run(self._schedule(), *given, *rest, **more)
            call_accumulate_hooks(self.hooked)
            return result
        except Exception as error:
            fault = self._first_fault(error)
            if fault is None:
                raise
            self._end(fault)
            if fault.rank == dist.get_rank():
                raise
            raise RankError(fault.report, fault) from error
        finally:
            self._given = None

    def agree(self) -> None:
        """Have this rank's stages agree with the others, unless they have in this step: where torch
        asks for it, in a first step or after a reset, or before it asks.

        Raises:
            PipelineError: a neighbouring rank has stages of torch's own.
        """
        given, self._given = self._given, None
        if given is None:
            return
        due, stages = self._due or self._new_agreement(), self.running.stages
        if not self._connected and not all(map(due.has_begun, self._neighbours())):
            self._refuse_torchs_stages()
        stages = sorted(stages, key=attrgetter("stage_index"))
        self._agreement, self._connected, self._agreeing = None, True, True
        due.run(stages, *given)
        self._agreement, self._agreeing = due, False
        for stage in stages:
            stage.agreement = due

    def _begin_agreement(self) -> None:
        """Agree anew in the first step, where training becomes evaluation, where another schedule
        has had the stages meanwhile, and for other inputs, if all stages are on this rank.
        """
        stages, done = self.running.stages, self._agreement
        if not all(isinstance(stage, RuntimeStage) for stage in stages):
            self._refuse_torchs_stages()
        trains, self._due, inputs = stages[0].has_backward, None, self._inputs
        if not self._neighbours() and self._given is not None:
            args, kwargs, _ = self._given
            self._inputs = [
                CallSignature.of(*flatten(*each)) for each in zip(args, kwargs, strict=True)
            ]
        is_known = done is not None and done.trains == trains and self._inputs == inputs
        if not is_known or any(stage.agreement is not done for stage in stages):
            self._due = self._new_agreement()
            if self._connected:  # else when the schedule has connected the ranks, and asks for it
                self.agree()

    def _new_agreement(self) -> Agreement:
        stage = self.running.stages[0]
        return Agreement(self._group, self._store, stage.device, stage.has_backward)

    def _refuse_torchs_stages(self) -> NoReturn:
        raise PipelineError(
            f"{self.running.name} has stages of torch's own beside SplitPipelineStage, on this "
            "rank or on one next to it, and they do not agree on shapes with each other. Make all "
            "stages of a pipeline SplitPipelineStage; or keep torch's PipelineStage for all, each "
            "around module = autosplit.split(submodule), with "
            "dw_builder=autosplit.pipelining.dw_builder(module)"
        )

    def _first_fault(self, error: Exception) -> Fault | None:
        """The fault that ends the steps; None where all ranks know of the error, which came before
        the first microbatch.
        """
        faults = FaultStore(self._store)
        fault = faults.first()
        if fault is None and not self._agreeing:
            where = f"a step of {self.running.name}"
            fault = faults.post(Fault.of(dist.get_rank(), where, error, error.__traceback__))
        return fault

    def _end(self, fault: Fault) -> None:
        self._ended = fault
        beside = {dist.get_global_rank(self._group, rank) for rank in self._neighbours()}
        for group in self.running.stages[0].groups():
            if dist.get_backend(group) == "gloo":
                for rank in beside.intersection(dist.get_process_group_ranks(group)):
                    disconnect(group, rank)

    def _neighbours(self) -> list[int]:
        """Ranks of the group that have a stage next to one of this rank."""
        running = self.running
        beside = {stage.stage_index + step for stage in running.stages for step in (-1, 1)}
        ranks = {running.placement[at] for at in beside if at in running.placement}
        return sorted(ranks - {running.stages[0].group_rank})

    def look(self) -> None:
        """Learn of the schedule's actions: other ones where they were exchanged."""
        schedule = self._schedule()
        if self._lists is not action_lists(schedule):
            self.running = describe_schedule(schedule)
            self._check_placement()
            first = self.running.stages[0]
            self._group, self._store = first.ranks, store_of(first.ranks)
            self._lists = action_lists(schedule)

    def _check_placement(self) -> None:
        """Refuse a schedule that puts these stages on another rank, or cannot run them.

        Raises:
            PipelineError: names the stages that belong here.
        """
        running, stage = self.running, self.running.stages[0]
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


class StageStep:
    """What one stage knows of the step that runs.

    Args:
        stage: the stage.

    Attributes:
        divisor: of what the step adds to gradients; 1: they are not divided, or not by the step.
    """

    def __init__(self, stage: SplitPipelineStage) -> None:
        self._stage = stage
        self._steps: ScheduleSteps | None = None
        self._mixed = False
        self.divisor = 1

    def begin(self) -> None:
        """Find the schedule, and whether it divides gradients."""
        stage, schedule = self._stage, running_schedule()
        steps = None if schedule is None else install_runner(schedule, ScheduleSteps)
        self._steps, self.divisor, self._mixed = steps, 1, False
        if steps is None:
            parameters = map(stage.sharding.owner, stage.parameters())
            self._mixed = stage.has_backward and any(p.grad is not None for p in parameters)
            return
        stage.agree = steps.agree
        if steps.running.stages[0] is stage:
            steps.look()
        # As torch does: actions without REDUCE_GRAD, read from a file of them, divide nothing.
        if steps.divides(stage):
            self.divisor = steps.running.microbatches

    @property
    def reduces(self) -> bool:
        """Whether the schedule will ask the stage to reduce its gradients."""
        steps, stage = self._steps, self._stage
        return steps is not None and stage.stage_index in steps.running.reduces

    def call_hooks(self, parameters: Sequence[Tensor]) -> None:
        """Have the hooks of parameters called that wait for gradients: in the end of the step."""
        if self._steps is None:
            call_accumulate_hooks(parameters)
        else:
            self._steps.hooked += parameters

    def scale(self, factor: int) -> None:
        """Divide gradients, unless the step has divided what it added.

        Raises:
            PipelineError: it cannot be told from what was there before.
        """
        stage = self._stage
        if not stage.has_backward or self.divisor != 1:  # torch asks in an evaluation, too
            return
        if self._mixed and factor != 1:
            raise PipelineError(
                f"stage {stage.stage_index}: gradients are to be divided by {factor}, but it "
                "was not told by a schedule's step() that they would be, so those of earlier steps "
                "are among them. Set them to None before, or run the schedule by step()"
            )
        for parameter in map(stage.sharding.owner, stage.parameters()):
            if parameter.grad is not None:
                parameter.grad.div_(factor)

    def calls(self) -> list[str]:
        """The calls of this stage's graphs in one step, in their order."""
        stage = self._stage
        rows = [] if self._steps is None else self._steps.running.rows
        row = map(Action.parse, rows[stage.group_rank] if rows else ())
        kinds = [action.kind for action in row if action.stage == stage.stage_index]
        return [BACKWARDS[kind] for kind in kinds if kind in BACKWARDS] or ["backward"] * 2
