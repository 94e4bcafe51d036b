"""The executor runs the actions of one rank on its stages, in the order of the schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.boundaries import Boundaries
from autosplit.pipeline.engine.moves import Moves
from autosplit.pipeline.engine.stage_arguments import (
    bind_arguments,
    output_gradients,
    sum_gradients,
)
from autosplit.pipeline.engine.stage_protocols import BackwardStage, ForwardStage, StageSharding
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.engine.timing import SpanRecorder, run_in_range
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.moves import recomputed_microbatches
from autosplit.pipeline.schedule.routes import incoming_messages, result_of
from autosplit.pipeline.schedule.schedule import SHARDING, Action, ActionKind, Schedule
from autosplit.ranks.first_error import ActionError, LostPeerError, RankActivity
from autosplit.runtime.accumulation import MOST_JOINED
from autosplit.stage import Stage
from autosplit.torch_internals.allocations import profiler_is_enabled

Values = list[Any]
"""Tensors, or None where there is no gradient."""


class BoundAction(NamedTuple):
    """An action of the row, with its calls bound to their arguments. A call that the action does
    not need is None.

    The recorder measures ``compute`` only, without waits.

    Attributes:
        action: the action.
        compute: the work, called with the result of ``fetch`` if there is one.
        fetch: waits for the action's input and returns it.
        deliver: passes the result on to other stages.
        waits: the calls before the action: they wait for the action's moves, or post receives.
        recorded: the actions for which the recorder records ``compute``: empty if the action
            computes nothing, several if they run as one call. Moves record their times themselves.
    """

    action: Action
    compute: Callable[..., Any]
    fetch: Callable[[], Values] | None = None
    deliver: Callable[[Values], None] | None = None
    waits: tuple[Callable[[], None], ...] = ()
    recorded: tuple[Action, ...] = ()


class Executor:
    """Runs the actions of ``rank`` on its stages.

    Each action is bound to its arguments once, when the executor is constructed. A step is then a
    loop over calls, without autograd.

    Args:
        stages: the rank's stages by index.
        schedule: a legal schedule.
        rank: the rank.
        messages: carries tensors between stages.
        activity: records the rank's present action, for error texts and timeouts.
        moves: carries out the schedule's moves; None if the schedule has no moves.
        batch_arguments: the stages' arguments that are inputs of the batch and need a gradient: by
            stage and by position of the argument, the name of the input.
        seeds: seeds the generators before each call of a stage that is not an ``autosplit.Stage``;
            a ``Stage`` seeds them itself.
        sharding: gathers and reduces sharded stages at the schedule's actions for it; None: no
            stage is sharded.
        watch: ``watch(bound)`` wraps the calls of an action so that its arguments and results are
            recorded; None: they are not recorded.

    Attributes:
        batch_gradients: gradients of the batch's inputs in the last run, by name and microbatch.
        stages: as passed.
        schedule: as passed.
        messages: as passed.
        moves: as passed.

    Raises:
        PipelineError: the schedule has an action of a stage that this rank does not have, a
            backward of a stage that only runs forward, or a RECOMPUTE of a stage that cannot
            recompute.
    """

    def __init__(
        self,
        stages: Mapping[int, ForwardStage],
        schedule: Schedule,
        rank: int,
        messages: Transport,
        *,
        activity: RankActivity | None = None,
        moves: Moves | None = None,
        batch_arguments: Mapping[int, Mapping[int, Hashable]] = MappingProxyType({}),
        seeds: StageSeeds | None = None,
        sharding: StageSharding | None = None,
        watch: Callable[[BoundAction], BoundAction] | None = None,
    ) -> None:
        self.stages: Mapping[int, Any] = stages
        self._batch_arguments = batch_arguments
        self._seeds, self._sharding = seeds, sharding
        self._gathering: set[int] = set()
        self.batch_gradients: dict[Any, dict[int, Tensor]] = defaultdict(dict)
        self._last = schedule.stages - 1
        self._rank = rank
        self.messages = messages
        self.schedule = schedule
        self._loss_grads: list[Values] = [[] for _ in range(schedule.microbatches)]
        self._inputs: list[Values] = [[] for _ in range(schedule.microbatches)]
        self._targets: Sequence[Sequence[Tensor]] = ()
        self._losses: dict[int, list[Tensor]] = {}
        self._recorder: SpanRecorder | None = None
        self._activity = RankActivity() if activity is None else activity
        self.moves = moves
        row = schedule.ranks[rank]
        self._recomputed = recomputed_microbatches(row)
        self._forward_stages: set[int] = set()
        bound = (self._bind(position, action) for position, action in enumerate(row))
        bound_row = self._joined(bound)
        if watch is not None:
            bound_row = [watch(bound) if bound.recorded else bound for bound in bound_row]
        self._row = self._bound = bound_row

    # The rows of 1F1B for two stages on two ranks and three microbatches, over time. ">" and "<"
    # are messages of the transport. An output is sent as soon as F has computed it. The receive of
    # a gradient is posted before the I that needs it.
    #
    #   rank 0       0F0  0F1   .   0I0  0W0  0F2  0I1  0W1  0I2  0W2
    #   transport       >    >    <         <    >         <
    #   rank 1        .   1F0  1I0  1F1  1I1  1W0  1F2  1I2  1W1  1W2
    #
    # The tensors of microbatch m on one stage live in these places between its actions:
    #
    #     MAILBOX or batch      IN FLIGHT               PENDING
    #            | input      saved tensors         deferred tensors
    #            v                  |                     |
    #          [ F ] ---------------+----> [ I ] ---------+----> [ W ]
    #            | output                  ^   |                   |
    #            v                         |   v                   v
    #     MAILBOX or losses           MAILBOX  MAILBOX        GRADIENT SUMS
    #                            gradient of the output, of the input
    #
    # The stage owns IN FLIGHT and PENDING. A move takes these tensors to another memory and back.
    # RECOMPUTE computes saved tensors from the inputs that F kept. See docs/one-step.md.

    @torch.no_grad()
    def run(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Sequence[Tensor]],
        boundaries: Sequence[Boundaries],
        recorder: SpanRecorder | None = None,
        loss_grads: Sequence[Values] = (),
    ) -> dict[int, list[Tensor]]:
        """Run the schedule once.

        Args:
            inputs: per microbatch, the batch's inputs; empty if no stage of the rank takes any.
            targets: per microbatch, the arguments of the last stage after its inputs; empty if no
                stage of the rank takes any.
            boundaries: per microbatch, the tensors between stages.
            recorder: records the start and end of every action; None: nothing is recorded.
            loss_grads: per microbatch, the gradient of the loss, a scalar tensor, then None for
                each part of the loss; empty if the schedule only runs forward.

        Returns:
            Maps each microbatch, in order, to the loss and its parts. Empty on ranks without the
            last stage.

        Raises:
            ActionError: an action failed; its error is the cause.
            LostPeerError: a peer died or did not answer in time.
        """
        self._targets, self._losses = targets, {}
        self.batch_gradients.clear()
        for kept, microbatch in zip(self._inputs, inputs, strict=False):  # inputs may be empty
            kept[:] = microbatch
        for kept, gradients in zip(self._loss_grads, loss_grads, strict=False):
            kept[:] = gradients
        self._recorder = recorder
        action: Action | None = None
        activity, is_profiled = self._activity, profiler_is_enabled()
        try:
            if recorder is not None:
                recorder.begin()
            self.messages.begin_step(boundaries)
            if self.moves is not None:
                self.moves.begin_step(self._tensors_of_callers)
            for action, compute, fetch, deliver, waits, recorded in self._row:
                activity.action, activity.waiting = action, True
                activity.turn += 1
                for wait in waits:
                    wait()
                # Hold no reference: inputs are freed at their last use, results once delivered.
                call = compute if fetch is None else partial(compute, fetch())
                activity.waiting = False
                activity.turn += 1
                if recorder is not None and recorded:
                    call = partial(recorder.run, recorded, call)
                if is_profiled:
                    call = partial(run_in_range, str(action), call)
                if deliver is None:
                    call()
                else:
                    deliver(call())
            activity.set_action(None, waiting=True)
            if self.moves is not None:
                spans = self.moves.finish_step()
                if recorder is not None:
                    recorder.note(spans)
            self.messages.finish_step()
            return dict(sorted(self._losses.items()))
        except (LostPeerError, ActionError):
            raise
        except Exception as error:
            if action is None:
                raise
            raise ActionError(action) from error
        finally:
            activity.set_action(None, waiting=False)
            self._targets, self._losses = (), {}
            for kept in (*self._inputs, *self._loss_grads):
                kept.clear()

    def set_audits(
        self,
        wraps: Iterable[tuple[Action, Callable[..., Any]]],
        waits: Collection[tuple[Action | None, Callable[[], None]]],
    ) -> None:
        """Let the next steps call other functions around actions and in waits.

        Args:
            wraps: pairs of an action and a function. The function is called in place of the
                action's work, with the work and its input as arguments. If an action has several,
                the last is the outermost.
            waits: pairs of an action and a function, which is called where the rank would wait
                before the action. None in place of an action is the end of the row.
        """
        row = [*self._bound]
        if waits:
            row.append(BoundAction(row[-1].action, _do_nothing))
        places: dict[Action | None, int] = {b.action: at for at, b in enumerate(self._bound)}
        places[None] = len(self._bound)
        for action, wrap in wraps:
            if (place := places.get(action)) is not None:
                row[place] = row[place]._replace(compute=partial(wrap, row[place].compute))
        for next_action, wait in waits:
            bound = row[place := places[next_action]]
            row[place] = bound._replace(waits=(*bound.waits, wait))
        self._row = row

    # --- binding actions --------------------------------------------------------------------------

    def _bind(self, position: int, action: Action) -> BoundAction:
        """Bind the action at a position of the row: its waits, its input, its work."""
        moves, kind = self.moves, action.kind
        if kind.is_move:
            if moves is None:
                raise PipelineError(
                    f"{action} is scheduled, but the executor has no moves: pass "
                    "Executor(moves=Moves(...))"
                )
            return BoundAction(action, partial(moves.start, position))
        if kind in SHARDING:
            # The span of an UNSHARD is the wait for it.
            recorded = (action,) if kind is ActionKind.REDUCE_GRAD else ()
            return BoundAction(action, self._sharding_call(action), recorded=recorded)
        wait = None if moves is None else moves.wait_before(position)
        waits = [*([wait] if wait else []), *self.messages.posts(action)]
        if not kind.is_compute:
            return BoundAction(action, _do_nothing, waits=tuple(waits))
        if action.stage in self._gathering:
            self._gathering.remove(action.stage)
            waits.append(partial(self._finish_gather, action.stage))
        bound, stage = self._bind_compute(action), self.stages[action.stage]
        if not isinstance(stage, Stage):
            if self._seeds is not None:
                bound = bound._replace(compute=partial(self._seeds.run, action, bound.compute))
        elif self._sharding is not None:
            bound = bound._replace(compute=self._sharding.agreeing(action, stage, bound.compute))
        return bound._replace(waits=tuple(waits), recorded=(action,))

    def _joined(self, row: Iterable[BoundAction]) -> list[BoundAction]:
        """The row with one call for consecutive Ws of a stage, if the stage joins them. A W with
        waits begins a new call.
        """
        joined: list[BoundAction] = []
        for bound in row:
            action, last = bound.action, joined[-1] if joined else None
            stage = self.stages.get(action.stage)
            if (
                last is not None
                and action.kind is last.action.kind is ActionKind.BACKWARD_WEIGHT
                and action.stage == last.action.stage
                and not bound.waits
                and joins_weights(stage)
            ):
                actions = (*last.recorded, action)
                microbatches = [action.microbatch for action in actions]
                compute = partial(stage.backward_weight, *microbatches)  # type: ignore[union-attr]
                joined[-1] = last._replace(compute=compute, recorded=actions)
            else:
                joined.append(bound)
        return joined

    def _sharding_call(self, action: Action) -> Callable[[], None]:
        """Bind an UNSHARD, RESHARD or REDUCE_GRAD. The call does nothing for stages that are not
        sharded.

        The next action of the stage waits for the all-gather.
        """
        sharding, stage = self._sharding, action.stage
        if sharding is None or stage not in sharding:
            return _do_nothing
        if action.kind is ActionKind.UNSHARD:
            self._gathering.add(stage)
            return partial(sharding.start_gather, stage)
        if action.kind is ActionKind.RESHARD:
            self._gathering.discard(stage)
            return partial(sharding.free, stage)

        def reduce() -> None:
            publisher: Any = self.stages[stage]
            publisher.publish()
            sharding.start_reduction(stage)

        return reduce

    def _finish_gather(self, stage: int) -> None:
        """Wait for the all-gather that a stage's UNSHARD has started."""
        sharding: Any = self._sharding
        call = partial(sharding.finish_gather, stage)
        if self._recorder is None:
            call()
        else:
            self._recorder.run((Action(stage, ActionKind.UNSHARD, 0),), call)

    def _bind_compute(self, action: Action) -> BoundAction:
        """Bind the input, the work and the result of F, I, W, B or RECOMPUTE."""
        stage, microbatch, kind = self.stages.get(action.stage), action.microbatch, action.kind
        if stage is None:
            raise PipelineError(
                f"{action} is scheduled on rank {self._rank}, which has stages "
                f"{sorted(self.stages)}: pass the stages that the schedule places on this rank"
            )
        if kind is ActionKind.FORWARD:
            forward: Callable[..., Values] = partial(stage.forward, microbatch)
            if (action.stage, microbatch) in self._recomputed:
                forward = partial(
                    self._require_recompute(action).forward, microbatch, keep="inputs"
                )
            # A module does not change within a step. Subclasses may not take ``steady``.
            if action.stage in self._forward_stages and type(stage).forward is Stage.forward:
                forward = partial(forward, steady=True)
            self._forward_stages.add(action.stage)
            return BoundAction(action, forward, self._inputs_of(action), self._outputs_to(action))
        if not isinstance(stage, BackwardStage):
            raise PipelineError(
                f"{action} is scheduled, but stage {action.stage} has no backward: its class needs "
                "the methods of autosplit.Stage, such as backward_input()"
            )
        if kind.is_memory:
            return BoundAction(
                action, partial(self._require_recompute(action).recompute, microbatch)
            )
        if kind is ActionKind.BACKWARD_WEIGHT:
            return BoundAction(action, partial(stage.backward_weight, microbatch))
        fused = kind is ActionKind.BACKWARD
        backward = partial(stage.backward if fused else stage.backward_input, microbatch)
        return BoundAction(action, backward, self._gradients_of(action), self._gradients_to(action))

    def _require_recompute(self, action: Action) -> Any:
        stage = self.stages[action.stage]
        if not hasattr(stage, "recompute"):
            raise PipelineError(
                f"{action} is scheduled with a RECOMPUTE, but stage {action.stage} cannot run its "
                "forward again: its class has no recompute(), see autosplit.Stage"
            )
        return stage

    def _inputs_of(self, action: Action) -> Callable[[], Values]:
        microbatch, dataflow = action.microbatch, self.messages.dataflow
        receives = [
            self.messages.receiver(message) for message in incoming_messages(action, dataflow)
        ]
        bring = bind_arguments(action.stage, dataflow, receives, self._inputs[microbatch].copy)
        if action.stage < self._last:
            return bring
        return lambda: [*bring(), *self._targets[microbatch]]

    def _outputs_to(self, action: Action) -> Callable[[Values], None] | None:
        if action.stage < self._last:
            return self.messages.sender(action)

        def keep(outputs: Values) -> None:
            self._losses[action.microbatch] = kept = [*outputs]
            for place, scalar in enumerate(kept):
                # Some kernels return the scalar in a storage as large as their input.
                if scalar.untyped_storage().nbytes() != scalar.nbytes:
                    kept[place] = scalar.clone()

        return keep

    def _gradients_of(self, action: Action) -> Callable[[], Values]:
        if action.stage == self._last:
            return self._loss_grads[action.microbatch].copy
        dataflow = self.messages.dataflow
        receives = [
            self.messages.receiver(message) for message in incoming_messages(action, dataflow)
        ]
        return output_gradients(action.stage, dataflow, receives)

    def _gradients_to(self, action: Action) -> Callable[[Values], None] | None:
        send = self.messages.sender(result_of(action))
        names = self._batch_arguments.get(action.stage)
        if not names:
            return send

        def keep(gradients: Values) -> None:
            for place, name in names.items():
                row = self.batch_gradients[name]
                total = sum_gradients(row.get(action.microbatch), gradients[place])
                if total is not None:
                    row[action.microbatch] = total
            if send is not None:
                send(gradients)

        return keep

    def _tensors_of_callers(self, microbatch: int) -> list[Tensor]:
        """Tensors of a microbatch to which callers also refer, so that moving them would free no
        memory.
        """
        targets = self._targets[microbatch] if self._targets else ()
        return [*self._inputs[microbatch], *targets, *self._loss_grads[microbatch][:1]]


def _do_nothing() -> None:
    """Compute nothing: for AWAIT, which only waits, and for stages that are not sharded."""


def joins_weights(stage: object) -> bool:
    """Whether a stage runs consecutive Ws as one call."""
    if not isinstance(stage, Stage) or type(stage).backward_weight is not Stage.backward_weight:
        return False
    return stage.joins_weights


def joined_weights(
    row: Sequence[Action], stages: Mapping[int, ForwardStage]
) -> Iterator[tuple[int, int]]:
    """Yield (place in the row of the first W, number of Ws) for each group of Ws that run as one
    call.
    """
    place = 0
    for (kind, stage), run in groupby(row, key=lambda action: (action.kind, action.stage)):
        count = len([*run])
        if kind is ActionKind.BACKWARD_WEIGHT and count > 1 and joins_weights(stages.get(stage)):
            yield place, min(count, MOST_JOINED)
        place += count
