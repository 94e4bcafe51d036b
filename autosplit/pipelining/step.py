"""A step of one of torch's schedules: one rank's part in it, and in that one stage's.

Stages agree on shapes before the first microbatch. A rank that fails inside of a step: its
neighbours raise too, and say why.

The gradients of one step, kept apart from those of the steps before it while they are scaled.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.board import Board, Fault
from autosplit.pipeline.engine.first_error import RankError
from autosplit.pipeline.engine.groups import disconnect
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.torch_internals.distributed import average_gradients
from autosplit.torch_internals.pipelining_schedules import (
    action_lists,
    described,
    finalizes,
    runner_of,
    running_schedule,
)
from autosplit.torch_internals.pipelining_stage import RuntimeStage

from .agreement import Agreement

if TYPE_CHECKING:
    from autosplit.pipelining.stage import SplitPipelineStage


_CALLS = {
    ActionKind.BACKWARD_INPUT: "backward_input",
    ActionKind.BACKWARD_WEIGHT: "backward_weight",
    ActionKind.BACKWARD: "backward",
}


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
        gradients: what a step adds to those of this rank's stages.
    """

    def __init__(self, schedule: Any, run: Callable[..., Any]) -> None:
        self._schedule, self._run = weakref.ref(schedule), run
        self._lists: Any = self  # not the schedule's
        self._ended: Fault | None = None
        self._given: tuple[Any, Any, Any] | None = None
        self._due: Agreement | None = None
        self._agreement: Agreement | None = None
        self._connected = self._agreeing = False
        self.gradients = StepGradients()
        self._look()

    def begin(self) -> None:
        """Begin a step."""
        self._look()
        self.gradients.abandon()

    def divides(self, stage: SplitPipelineStage) -> bool:
        """Whether the step divides the gradients of a stage itself."""
        ends = finalizes(self._schedule()) or not stage.sharding.groups
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
        self._agreeing = False
        try:
            self._begin_agreement()
            given = arg_mbs, kwarg_mbs, target_mbs
            return self._run(self._schedule(), *given, *rest, **more)
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
        """Have this rank's stages agree with the others, where that is due in this step.

        Raises:
            PipelineError: a neighbouring rank has stages of torch's own.
        """
        due, self._due = self._due, None
        if due is None or self._given is None:
            return
        if not self._connected and not all(map(due.has_begun, self._neighbours())):
            self._refuse_torchs_stages()
        stages = sorted(self.running.stages, key=attrgetter("stage_index"))
        self._agreement, self._connected, self._agreeing = None, True, True
        due.run(stages, *self._given)
        self._agreement, self._agreeing = due, False
        for stage in stages:
            stage.agreement = due

    def _begin_agreement(self) -> None:
        """Agree anew in the first step, where training becomes evaluation, and where another
        schedule has had the stages meanwhile.
        """
        stages, done = self.running.stages, self._agreement
        if not all(isinstance(stage, RuntimeStage) for stage in stages):
            self._refuse_torchs_stages()
        trains, self._due = stages[0].has_backward, None
        if done is None or done.trains != trains or any(s.agreement is not done for s in stages):
            self._due = Agreement(self._group, stages[0].device, trains)
        if self._connected:  # else when the schedule has connected the ranks, and asks for it
            self.agree()

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
        board = Board(self._group.get_group_store())
        fault = board.first()
        if fault is None and not self._agreeing:
            where = f"a step of {self.running.name}"
            fault = board.post(Fault.of(dist.get_rank(), where, error, error.__traceback__))
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

    def _look(self) -> None:
        """Learn of the schedule's actions: other ones where they were exchanged."""
        schedule = self._schedule()
        if self._lists is not action_lists(schedule):
            self.running = described(schedule)
            self._check_placement()
            first = self.running.stages[0]
            self._group = first.ranks
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
    """

    def __init__(self, stage: SplitPipelineStage) -> None:
        self._stage = stage
        self._steps: ScheduleSteps | None = None
        self._apart = self._mixed = self._ended = False
        self._parameters: Sequence[Tensor] = ()

    def begin(self) -> None:
        """Find the schedule, and keep its gradients apart from earlier ones where it scales."""
        stage, schedule = self._stage, running_schedule()
        steps = None if schedule is None else runner_of(schedule, ScheduleSteps)
        if steps is not None:
            stage.agree = steps.agree
            if steps.running.stages[0] is stage:
                steps.begin()
        self._steps, self._ended = steps, False
        if not stage.has_backward:
            return
        self._parameters = [*map(stage.sharding.owner, stage.parameters())]
        self._mixed = steps is None and any(p.grad is not None for p in self._parameters)
        # As torch does: actions without REDUCE_GRAD, read from a file of them, divide nothing.
        self._apart = steps is not None and steps.divides(stage)
        if steps is not None and self._apart:
            steps.gradients.begin(self._parameters)

    def end(self) -> None:
        """Everything was added: have it averaged where data parallelism is to, and reduced where
        the schedule will not ask for that.
        """
        steps, stage = self._steps, self._stage
        if isinstance(stage.submod, DistributedDataParallel):
            average_gradients(stage.submod)
        if steps is None or stage.stage_index not in steps.running.reduces:
            stage.sharding.reduce()
            stage.sharding.reshard()

    def scale(self, factor: int) -> None:
        """Divide what this step added.

        Raises:
            PipelineError: it cannot be told from what was there before.
        """
        if not self._stage.has_backward:  # torch's runtime asks in an evaluation, too
            return
        if self._apart and self._steps is not None:
            if not self._ended:
                self._ended = True
                self._steps.gradients.scale(self._parameters, factor)
        elif self._mixed and factor != 1:
            raise PipelineError(
                f"stage {self._stage.stage_index}: gradients are to be divided by {factor}, but it "
                "was not told by a schedule's step() that they would be, so those of earlier steps "
                "are among them. Set them to None before, or run the schedule by step()"
            )
        elif factor != 1:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(factor)

    def calls(self) -> list[str]:
        """The calls of this stage's graphs in one step, in their order."""
        stage = self._stage
        rows = [] if self._steps is None else self._steps.running.rows
        row = map(Action.parse, rows[stage.group_rank] if rows else ())
        kinds = [action.kind for action in row if action.stage == stage.stage_index]
        return [_CALLS[kind] for kind in kinds if kind in _CALLS] or ["backward"] * 2


class StepGradients:
    """What the stages of one rank add to ``.grad`` in one step of a schedule that divides its
    gradients by the number of microbatches: only they are divided, not what was there before, and
    those of a parameter that several stages share once.
    """

    def __init__(self) -> None:
        self._users: Counter[int] = Counter()
        self._earlier: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Put gradients of earlier steps aside; called for each stage before any of them adds."""
        self._users.update(map(id, parameters))
        for parameter in parameters:
            earlier = parameter.grad
            if earlier is not None and id(parameter) not in self._earlier:
                self._earlier[id(parameter)] = parameter, earlier
                parameter.grad = None

    def scale(self, parameters: Sequence[Tensor], factor: int) -> None:
        """Divide what this step added to parameters that no other stage adds to any more, and add
        it to what was there before.
        """
        for parameter in parameters:
            key = id(parameter)
            self._users[key] -= 1
            if self._users[key] > 0:
                continue
            if parameter.grad is not None:
                parameter.grad.div_(factor)
            if key in self._earlier:
                _put_back(*self._earlier.pop(key))

    def abandon(self) -> None:
        """End a step that did not come to its end: put back what was aside, unless all gradients
        were set to None since.
        """
        aside, self._earlier = list(self._earlier.values()), {}
        if any(parameter.grad is not None for parameter, _ in aside):
            for parameter, earlier in aside:
                _put_back(parameter, earlier)
        self._users.clear()


def _put_back(parameter: Tensor, earlier: Tensor) -> None:
    parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
