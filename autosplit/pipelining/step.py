"""One stage's part in a step of torch's runtime: what is known of the schedule, and scaling.

A rank that fails inside of a step: its neighbours raise too, and say why.

What a stage does better as it knows which action follows: I and W as a B, several W as one.

The gradients of one step, kept apart from those of the steps before it while they are scaled.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import PipelineError, ScheduleError
from autosplit.pipeline.builders.fusing import fuse_adjacent
from autosplit.pipeline.engine.first_error import Board, Fault, RankError
from autosplit.pipeline.engine.groups import disconnect
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.runtime.compiled_graph import Call
from autosplit.torch_internals.distributed import average_gradients
from autosplit.torch_internals.pipelining_schedules import (
    RunningSchedule,
    action_lists,
    described,
    run_microbatches_by,
    running_schedule,
)

if TYPE_CHECKING:
    from autosplit.pipelining.stage import SplitPipelineStage


_UNIT = (1.0, 1.0, 1.0)
_CALLS = {
    ActionKind.BACKWARD_INPUT: "backward_input",
    ActionKind.BACKWARD_WEIGHT: "backward_weight",
    ActionKind.BACKWARD: "backward",
}


@dataclass(frozen=True)
class ActionPlan:
    """How one rank's actions are run.

    Attributes:
        fused: stage and microbatch of each I that is run with its W, which follows it, as one B.
        joined: those of each W whose next action on this rank is W of the same stage.
        row: the actions.
    """

    fused: frozenset[tuple[int, int]] = frozenset()
    joined: frozenset[tuple[int, int]] = frozenset()
    row: Sequence[Action] = ()

    @classmethod
    def of(cls, running: RunningSchedule, rank: int) -> ActionPlan:
        """The plan for one rank of a schedule that runs."""
        if not running.rows:
            return cls()
        rows = tuple(tuple(map(Action.parse, row)) for row in running.rows)
        mine = rows[rank]
        return cls(_fused(running, rows, rank), frozenset(_joined(mine)), mine)

    def calls(self, stage: int, *, joined: bool) -> list[Call]:
        """The calls of a stage's graphs in one step, in their order.

        Args:
            stage: the stage.
            joined: whether Ws that follow each other are one call.
        """
        found: list[Call] = []
        together = 1
        for action in self.row:
            place = (action.stage, action.microbatch)
            if action.stage != stage or action.kind not in _CALLS:
                continue
            if action.kind is ActionKind.BACKWARD_WEIGHT:
                if place in self.fused:
                    continue
                if joined and place in self.joined:
                    together += 1
                    continue
                found.append(("backward_weight", together))
                together = 1
            else:
                found.append("backward" if place in self.fused else _CALLS[action.kind])
        return found or ["backward"] * 2


def _fused(
    running: RunningSchedule, rows: tuple[tuple[Action, ...], ...], rank: int
) -> frozenset[tuple[int, int]]:
    """Is that become a B where no other rank waits for their gradient, by unit times."""
    count = len(running.placement)
    placement = tuple(running.placement[stage] for stage in range(count))
    split = any(a.kind is ActionKind.BACKWARD_INPUT for row in rows for a in row)
    if not split:
        return frozenset()
    schedule = Schedule(running.name, count, running.microbatches, rows, placement, split)
    costs = Costs([_UNIT] * count, [StageMemory(1.0, 1.0)] * count)
    try:
        fused = fuse_adjacent(schedule, costs)
    except ScheduleError:  # such as one that torch's own lowering will refuse
        return frozenset()
    before = _wholes(rows[rank])
    return frozenset(_wholes(fused.ranks[rank]) - before)


def _wholes(row: Sequence[Action]) -> set[tuple[int, int]]:
    return {(a.stage, a.microbatch) for a in row if a.kind is ActionKind.BACKWARD}


def _joined(row: Sequence[Action]) -> set[tuple[int, int]]:
    pairs = pairwise(row)
    return {
        (a.stage, a.microbatch)
        for a, b in pairs
        if a.kind is b.kind is ActionKind.BACKWARD_WEIGHT and a.stage == b.stage
    }


class FirstFailure:
    """Ends a pipeline's steps on all ranks where one rank's step raises.

    The rank leaves its error in the store of the process group and closes its connections to the
    neighbouring stages, which would wait for its messages. Their waits end, they find the error,
    and close theirs. Over other backends than Gloo connections stay open: the neighbours' waits end
    at the group's timeout, and then say the same.

    Args:
        schedule: its name.
        group: of the pipeline; None for all ranks.
        neighbours: global ranks that have a stage next to one of this rank.
    """

    def __init__(
        self, schedule: str, group: dist.ProcessGroup | None, neighbours: Iterable[int]
    ) -> None:
        self._schedule = schedule
        self._group = dist.group.WORLD if group is None else group
        self._neighbours = sorted({*neighbours} - {dist.get_rank()})
        self._ended: Fault | None = None

    def run(self, microbatches: Callable[[], Any], is_told: Callable[[], bool]) -> Any:
        """A step's microbatches.

        Args:
            microbatches: runs them.
            is_told: whether the error that they ended with came before the first of them, while
                stages agreed on shapes: then neighbours know of it, and a next step may go well.

        Raises:
            RankError: another rank failed; with its error and traceback.
            PipelineError: a step has failed before.
            Exception: as it was raised on this rank.
        """
        if self._ended is not None:
            raise PipelineError(
                f"{self._schedule} has ended, as {self._ended.headline}. Its process group has no "
                "connections any more: start anew, from a checkpoint, with new process groups"
            )
        try:
            return microbatches()
        except Exception as error:
            board = self._board()
            fault = None if board is None else board.first()
            if fault is None and is_told():
                raise
            where = f"a step of {self._schedule}"
            mine = Fault.of(dist.get_rank(), where, error, error.__traceback__)
            if fault is None:
                fault = mine if board is None else board.post(mine)
            self._end(fault)
            if fault.rank == dist.get_rank():
                raise
            raise RankError(fault.report, fault) from error

    def _board(self) -> Board | None:
        return None if self._group is None else Board(self._group.get_group_store())

    def _end(self, fault: Fault) -> None:
        self._ended = fault
        if self._group is not None and dist.get_backend(self._group) == "gloo":
            for rank in self._neighbours:
                disconnect(self._group, rank)


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
            if self._users[key] <= 0:
                self._finish(parameter, self._earlier.pop(key, None), factor)

    def _finish(self, parameter: Tensor, aside: tuple[Tensor, Tensor] | None, factor: int) -> None:
        grad = parameter.grad
        if aside is None or grad is None or not _is_exact(grad, factor):
            if grad is not None:
                grad.div_(factor)
            if aside is not None:
                _put_back(*aside)
            return
        # Both in one pass over memory, where a product rounds as little as the quotient.
        parameter.grad = aside[1].add_(grad, alpha=1 / factor)

    def abandon(self) -> None:
        """End a step that did not come to its end: put back what was aside, unless all gradients
        were set to None since.
        """
        aside, self._earlier = list(self._earlier.values()), {}
        if any(parameter.grad is not None for parameter, _ in aside):
            for parameter, earlier in aside:
                _put_back(parameter, earlier)
        self._users.clear()


def _is_exact(grad: Tensor, factor: int) -> bool:
    """Whether the reciprocal of a divisor divides as it does. The smallest numbers of float16 are
    not small enough for that.
    """
    return factor & (factor - 1) == 0 and grad.dtype is not torch.float16 and not grad.is_sparse


def _put_back(parameter: Tensor, earlier: Tensor) -> None:
    parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
