"""Steps of a torch schedule: ``ScheduleSteps`` for one rank, ``StageStep`` for one stage.

Stages agree on shapes before the first microbatch. If a rank fails within a step, its neighbours
raise its error, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.schedule.schedule import Action, ActionKind, calls_of
from autosplit.ranks.fault_store import Fault, FaultStore
from autosplit.ranks.first_error import RankError
from autosplit.ranks.groups import disconnect
from autosplit.runtime.specializations import CallSignature, ModuleCall
from autosplit.torch_internals.autograd import call_accumulate_hooks
from autosplit.torch_internals.distributed import store_of
from autosplit.torch_internals.pipelining_schedules import (
    RunningSchedule,
    action_lists,
    describe_schedule,
    install_runner,
    reduces_gradients,
    running_schedule,
)
from autosplit.torch_internals.pipelining_stage import RuntimeStage

from .agreement import RowAgreement

if TYPE_CHECKING:
    from autosplit.pipelining.stage import SplitPipelineStage


class ScheduleSteps:
    """The steps of one rank under a torch schedule.

    Stages agree on shapes before the first microbatch. If the step of one rank raises, all ranks
    end. The rank writes its error into the store of the process group, and closes its connections
    to neighbouring ranks. So the neighbours' waits end, and the neighbours read the error and close
    their connections. With backends other than Gloo, connections stay open: the neighbours' waits
    end at the group's timeout, and the neighbours read the error then.

    Args:
        schedule: the torch schedule.
        run: the schedule's method that runs the microbatches of a step.

    Attributes:
        running: the schedule's actions, stages and placement.
        hooked: parameters whose ``register_post_accumulate_grad_hook`` hooks are called at the end
            of the step, when gradients are complete and divided.
    """

    def __init__(self, schedule: Any, run: Callable[..., Any]) -> None:
        self._schedule, self._run = weakref.ref(schedule), run
        self._lists: Any = self  # differs from any schedule's
        self._ended: Fault | None = None
        self._microbatches: tuple[Any, Any, Any] | None = None
        self._inputs: list[CallSignature] = []
        self.hooked: list[Tensor] = []
        self._due: RowAgreement | None = None
        self._agreement: RowAgreement | None = None
        self._connected = self._agreeing = False
        self.read_actions()

    def divides(self, stage: SplitPipelineStage) -> bool:
        """Whether the step itself divides the gradients of a stage."""
        at_end = reduces_gradients(self._schedule()) or not stage.sharding.groups
        return self.running.scales and at_end and stage.stage_index in self.running.reduces

    def __call__(
        self,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        *rest: Any,
        **more: Any,
    ) -> Any:
        """Run a step's microbatches; this replaces the schedule's own method.

        Raises:
            RankError: another rank failed; has that rank's error and traceback.
            NeighbourError: another rank failed before the first microbatch. The next step may
                succeed.
            PipelineError: an earlier step has failed.
            Exception: the error of this rank.
        """
        if self._ended is not None:
            raise PipelineError(
                f"{self.running.name} has ended, because {self._ended.headline}. The connections "
                "of its process group are closed: restart from a checkpoint, with new process "
                "groups"
            )
        count = self.running.microbatches
        self._microbatches = arg_mbs or [()] * count, kwarg_mbs or [{}] * count, target_mbs
        self._agreeing, self.hooked = False, []
        try:
            self._begin_agreement()
            result = self._run(self._schedule(), arg_mbs, kwarg_mbs, target_mbs, *rest, **more)
            call_accumulate_hooks(self.hooked)
            return result
        except Exception as error:
            fault = self._first_fault(error)
            if fault is None:
                raise
            self._end(fault)
            if fault.rank == dist.get_rank():
                raise
            raise RankError(fault.full_text, fault) from error
        finally:
            self._microbatches = None

    def agree(self) -> None:
        """Make this rank's stages agree on shapes with the other ranks' stages, once in a step.

        Torch calls the method in a first step and after a reset. In other steps ``__call__`` calls
        the method if needed.

        Raises:
            PipelineError: a neighbouring rank has stages of torch's own.
        """
        microbatches, self._microbatches = self._microbatches, None
        if microbatches is None:
            return
        due, stages = self._due or self._new_agreement(), self.running.stages
        if not self._connected and not all(map(due.has_begun, self._peers)):
            self._refuse_torchs_stages()
        stages = sorted(stages, key=attrgetter("stage_index"))
        self._agreement, self._connected, self._agreeing = None, True, True
        due.run(stages, *microbatches)
        self._agreement, self._agreeing = due, False
        for stage in stages:
            stage.agreement = due

    def _begin_agreement(self) -> None:
        """Begin a new agreement if the last one does not hold for this step.

        A new agreement is needed in the first step, between training and evaluation, after another
        schedule has used the stages and, if all stages are on this rank, for other input shapes.
        """
        stages, done = self.running.stages, self._agreement
        if not all(isinstance(stage, RuntimeStage) for stage in stages):
            self._refuse_torchs_stages()
        trains, self._due, inputs = stages[0].has_backward, None, self._inputs
        if not self._peers and self._microbatches is not None:
            args, kwargs, _ = self._microbatches
            calls = zip(args, kwargs, strict=True)
            self._inputs = [ModuleCall.of(*call).signature for call in calls]
        is_known = done is not None and done.trains == trains and self._inputs == inputs
        if not is_known or any(stage.agreement is not done for stage in stages):
            self._due = self._new_agreement()
            if self._connected:  # otherwise torch connects the ranks first, and calls it then
                self.agree()

    def _new_agreement(self) -> RowAgreement:
        stage = self.running.stages[0]
        return RowAgreement(self._group, self._store, stage.device, stage.has_backward)

    def _refuse_torchs_stages(self) -> NoReturn:
        raise PipelineError(
            f"{self.running.name} has stages of torch's own beside SplitPipelineStage, on this "
            "rank or a neighbouring one, and the two cannot agree on shapes. Make all stages of a "
            "pipeline SplitPipelineStage; or keep torch's PipelineStage for all, each around "
            "module = autosplit.split(submodule), with "
            "dw_builder=autosplit.pipelining.dw_builder(module)"
        )

    def _first_fault(self, error: Exception) -> Fault | None:
        """The fault that ends the steps; None for an error before the first microbatch, which all
        ranks raise.
        """
        faults = FaultStore(self._store)
        fault = faults.first()
        if fault is None and not self._agreeing:
            phase = f"a step of {self.running.name}"
            fault = faults.post(Fault.of(dist.get_rank(), phase, error, error.__traceback__))
        return fault

    def _end(self, fault: Fault) -> None:
        """End all steps, and close the connections to neighbouring ranks."""
        self._ended = fault
        neighbours = {dist.get_global_rank(self._group, rank) for rank in self._peers}
        for group in self.running.stages[0].groups():
            if dist.get_backend(group) == "gloo":
                for rank in neighbours.intersection(dist.get_process_group_ranks(group)):
                    disconnect(group, rank)

    def read_actions(self) -> None:
        """Read the schedule's actions if they are new or have been replaced."""
        schedule = self._schedule()
        if self._lists is not action_lists(schedule):
            self.running = describe_schedule(schedule)
            self._check_placement()
            first = self.running.stages[0]
            self._group, self._store = first.ranks, store_of(first.ranks)
            self._peers = _neighbours(self.running)
            self._lists = action_lists(schedule)

    def _check_placement(self) -> None:
        """Refuse a schedule that places this rank's stages elsewhere, or cannot run them.

        Raises:
            PipelineError: names the stages that belong on this rank.
        """
        running, stage = self.running, self.running.stages[0]
        if running.single and stage.group_size != stage.num_stages:
            raise PipelineError(
                f"{running.name} runs one stage a rank: {stage.num_stages} stages need a process "
                f"group of {stage.num_stages}, got one of {stage.group_size}"
            )
        expected = [s for s, rank in sorted(running.placement.items()) if rank == stage.group_rank]
        indices = sorted(stage.stage_index for stage in running.stages)
        if not running.single and indices != expected:
            raise PipelineError(
                f"{running.name} has stages {expected} on rank {stage.group_rank} of "
                f"{stage.group_size}, but got stages {indices}: construct stages {expected} there"
            )


def _neighbours(running: RunningSchedule) -> list[int]:
    """Ranks of the group that have a stage directly before or after a stage of this rank."""
    neighbours = {stage.stage_index + step for stage in running.stages for step in (-1, 1)}
    ranks = {running.placement[at] for at in neighbours if at in running.placement}
    return sorted(ranks - {running.stages[0].group_rank})


class StageStep:
    """The running step, as one stage sees it.

    Args:
        stage: the stage.

    Attributes:
        divisor: the number by which the step divides the gradients that it adds; 1 if it does not
            divide.
    """

    def __init__(self, stage: SplitPipelineStage) -> None:
        self._stage = stage
        self._steps: ScheduleSteps | None = None
        self._has_earlier_gradients = False
        self._waiting: tuple[RunningSchedule | None, frozenset[int]] = None, frozenset()
        self.divisor = 1

    def find_schedule(self) -> None:
        """Find the running schedule, and whether it divides gradients."""
        stage, schedule = self._stage, running_schedule()
        steps = None if schedule is None else install_runner(schedule, ScheduleSteps)
        self._steps, self.divisor, self._has_earlier_gradients = steps, 1, False
        if steps is None:
            parameters = map(stage.sharding.owner, stage.parameters())
            self._has_earlier_gradients = stage.has_backward and any(
                p.grad is not None for p in parameters
            )
            return
        stage.agree = steps.agree
        if steps.running.stages[0] is stage:
            steps.read_actions()
        # As in torch, actions from a file without REDUCE_GRAD divide nothing.
        if steps.divides(stage):
            self.divisor = steps.running.microbatches

    @property
    def reduces(self) -> bool:
        """Whether the schedule has a REDUCE_GRAD for the stage."""
        steps, stage = self._steps, self._stage
        return steps is not None and stage.stage_index in steps.running.reduces

    def call_hooks(self, parameters: Sequence[Tensor]) -> None:
        """Call the accumulate hooks of parameters, at the end of the step."""
        if self._steps is None:
            call_accumulate_hooks(parameters)
        else:
            self._steps.hooked += parameters

    def scale(self, factor: int) -> None:
        """Divide the stage's gradients, unless the step has divided them already.

        Raises:
            PipelineError: ``.grad`` contains gradients of earlier steps, which would be divided
                again.
        """
        stage = self._stage
        if not stage.has_backward or self.divisor != 1:  # torch calls it in an evaluation, too
            return
        if self._has_earlier_gradients and factor != 1:
            raise PipelineError(
                f"stage {stage.stage_index}: cannot divide gradients by {factor} outside of a "
                "schedule's step(), because .grad contains gradients of earlier steps, which would "
                "be divided again. Set .grad to None before each step, or run the schedule by "
                "step()"
            )
        for parameter in map(stage.sharding.owner, stage.parameters()):
            if parameter.grad is not None:
                parameter.grad.div_(factor)

    def calls(self) -> list[str]:
        """The calls of this rank's row in one step, in order; see ``calls_of``. Actions of other
        stages count as ``"forward"``.
        """
        return calls_of(self._row, self._stage.stage_index) or ["backward"] * 2

    @property
    def _row(self) -> list[Action]:
        """The computations of this rank, in order; empty if the schedule does not list actions."""
        rows = [] if self._steps is None else self._steps.running.rows
        return [*map(Action.parse, rows[self._stage.group_rank] if rows else ())]

    def weights_that_wait(self) -> frozenset[int]:
        """The microbatches whose W is followed directly by a W of the same stage."""
        running = None if self._steps is None else self._steps.running
        if self._waiting[0] is not running:
            weight = ActionKind.BACKWARD_WEIGHT, self._stage.stage_index
            waiting = frozenset(
                action.microbatch
                for action, following in pairwise(self._row)
                if (action.kind, action.stage) == (following.kind, following.stage) == weight
            )
            self._waiting = running, waiting
        return self._waiting[1]
