"""Runs one rank's actions of a schedule."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.faults.first_error import ActionError, LostPeerError
from autosplit.pipeline.engine.faults.rank_activity import RankActivity
from autosplit.pipeline.engine.memory.moves import MicrobatchMoves
from autosplit.pipeline.engine.messages.stage_ports import (
    Probe,
    Receive,
    arguments,
    output_gradients,
)
from autosplit.pipeline.engine.messages.transport import Transport
from autosplit.pipeline.schedule.action import Action, ActionKind, JoinedWeights
from autosplit.pipeline.schedule.dependency import result_of
from autosplit.pipeline.schedule.moves import recomputed
from autosplit.pipeline.schedule.routes import parcels_for
from autosplit.pipeline.schedule.schedule import Schedule

from .action_order import (
    Order,
    Step,
    Values,
    as_scheduled,
    at_once,
    behind,
    drop,
    slices_together,
)
from .joint_weights import JoiningStage, join_adjacent_weights, joined_step
from .recorder import Recorder
from .stage_protocols import BackwardStage, ForwardStage, RecomputingStage, Shards, SlicedStage
from .weight_completions import Finished, WeightCompletions

__all__ = ["BackwardStage", "Executor", "ForwardStage"]


Fetch = Callable[[], Values]
Compute = Callable[[Values], Values]
Deliver = Callable[[Values], None]

RECORDED = frozenset({kind for kind in ActionKind if kind.is_compute} | {ActionKind.UNSHARD})
"""Actions of which a recorder notes when they ran; moves and reductions note it themselves."""


class Executor:
    """Runs the actions of ``rank`` on its stages.

    Each action is prepared once, as three calls without arguments to look up; a step is a loop
    over them, without autograd. Ws of one stage that stand next to each other are one call where
    the stage joins them.

    Args:
        stages: the rank's stages by index.
        schedule: a legal schedule.
        rank: whose actions to run.
        transport: carries tensors between stages.
        loss_grad: the gradient of each microbatch's loss, a scalar tensor; None if the schedule
            only runs forward.
        order: in which order the rank takes up its actions.
        finished: called with a stage and the number of a slice when the last of that slice's weight
            gradients of the step is there; a stage without slices has slice 0.
        place: is told what the rank is doing.
        moves: carries out the schedule's moves, where there are any.
        shards: gathers and frees the parameters of stages that are sharded.

    Attributes:
        completions: in which order stages and slices are ``finished``, as the schedule has it.

    Raises:
        PipelineError: the schedule gives this rank a stage that it does not hold, or a backward
            to a stage that has none, or one that cannot run its forward again.
    """

    def __init__(
        self,
        stages: Mapping[int, ForwardStage],
        schedule: Schedule,
        rank: int,
        transport: Transport,
        *,
        loss_grad: Tensor | None,
        order: Order = as_scheduled,
        finished: Finished | None = None,
        place: RankActivity | None = None,
        moves: MicrobatchMoves | None = None,
        shards: Shards | None = None,
    ) -> None:
        self._shards = shards
        self._stages = stages
        self._schedule = schedule
        self._rank = rank
        self._transport = transport
        self._loss_grad = loss_grad
        self._order = order
        self._inputs: Sequence[Sequence[Tensor]] = ()
        self._targets: Sequence[Sequence[Tensor]] = ()
        self._losses: dict[int, Tensor] = {}
        self._place = RankActivity() if place is None else place
        self._completions = WeightCompletions(finished)
        self._moves = moves
        self._again = recomputed(schedule.ranks[rank])
        self._places = _places(schedule.ranks[rank])
        row = join_adjacent_weights(schedule.ranks[rank], stages)
        steps = [step for each in row for step in self._steps_of(each)]
        if finished is not None and order is as_scheduled:
            steps = slices_together(steps)
        self._steps = self._completions.counted(steps)
        self.completions = self._completions.order

    @torch.no_grad()
    def run(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Sequence[Tensor]],
        recorder: Recorder | None = None,
    ) -> dict[int, Tensor]:
        """Run the schedule once.

        Args:
            inputs: per microbatch, the batch's inputs; not used without a stage that takes them.
            targets: per microbatch, what comes after the last stage's inputs; likewise.
            recorder: notes what ran when.

        Returns:
            The losses of the microbatches that went through the last stage here, in order.

        Raises:
            ActionError: an action failed; its error is the cause.
            LostPeerError: a peer died or did not answer in time.
        """
        self._inputs, self._targets, self._losses = inputs, targets, {}
        self._completions.begin()
        action: Action | None = None
        place = self._place
        try:
            if recorder is not None:
                recorder.begin()
            self._transport.begin()
            if self._moves is not None:
                self._moves.begin(self._held_outside)
            for step in self._order(self._steps):
                action = step.action
                for call in (step,) if step.calls is None else step.calls():
                    action = call.action
                    place.fetch(action)
                    values = call.fetch()
                    place.compute()
                    if recorder is None or call.action.kind not in RECORDED:
                        call.deliver(call.compute(values))
                    else:
                        compute = partial(call.compute, values)
                        del values  # what is taken is cleared at its last use
                        call.deliver(recorder.run(action, compute))
            place.fetch(None)
            if self._moves is not None:
                spans = self._moves.finish()
                if recorder is not None:
                    recorder.note(spans)
            self._transport.finish()
            return dict(sorted(self._losses.items()))
        except (LostPeerError, ActionError):
            raise
        except Exception as error:
            if action is None:
                raise
            raise ActionError(action) from error
        finally:
            place.leave()
            self._inputs, self._targets, self._losses = (), (), {}

    def _steps_of(self, action: Action) -> Iterator[Step]:
        """What ``_prepare`` makes, behind what it has to wait for of moves."""
        moves = self._moves
        if action.kind.is_move:
            place = self._places[action].popleft()
            if moves is None:
                raise PipelineError(f"{action} is scheduled, and nothing carries out moves")
            yield Step(action, list, _without_values(partial(moves.start, place)), drop, at_once)
            return
        if action.kind.is_sharding:
            yield from self._sharding(action)
            return
        single = (Action(action.stage, action.kind, each) for each in action.microbatches)
        places = [self._places[each].popleft() for each in single]
        if action.kind is ActionKind.AWAIT:
            steps = iter([Step(action, list, lambda values: values, drop, at_once)])
        else:
            steps = self._prepare(action)
        if moves is not None:
            needs = [need for place in places if (need := moves.needed(place)) is not None]
            if needs:
                arrived = [partial(moves.arrived, place) for place in places]
                yield behind(next(steps), needs, arrived)
        yield from steps

    def _sharding(self, action: Action) -> Iterator[Step]:
        """Nothing where the stage is not sharded."""
        shards = self._shards
        if shards is not None and action.stage in shards.stages:
            gathers = action.kind is ActionKind.UNSHARD
            call = partial(shards.gather if gathers else shards.free, action.stage)
            yield Step(action, list, _without_values(call), drop, at_once)

    def _held_outside(self, microbatch: int) -> list[Tensor]:
        """Tensors of a microbatch that are held besides by whoever gave them."""
        given = [rows[microbatch] for rows in (self._inputs, self._targets) if rows]
        loss_grad = [] if self._loss_grad is None else [self._loss_grad]
        return [*(tensor for row in given for tensor in row), *loss_grad]

    def _prepare(self, action: Action) -> Iterator[Step]:
        """The action's step; of a W that comes in slices, one for each."""
        stage, microbatch = self._stages.get(action.stage), action.microbatch
        if stage is None:
            raise PipelineError(
                f"{action} is scheduled on rank {self._rank}, which holds stages "
                f"{sorted(self._stages)}"
            )
        if action.kind is ActionKind.FORWARD:
            forward = partial(stage.forward, microbatch)
            if (action.stage, microbatch) in self._again:
                forward = partial(self._recomputing(action).forward, microbatch, keep="inputs")
            fetch, arrived = self._fetch_inputs(action)
            yield Step(action, fetch, forward, self._deliver_outputs(action), arrived)
            return
        if not isinstance(stage, BackwardStage):
            raise PipelineError(f"{action} is scheduled, but stage {action.stage} has no backward")
        if action.kind is ActionKind.RECOMPUTE:
            again = partial(self._recomputing(action).recompute, microbatch)
            yield Step(action, list, _without_values(again), drop, at_once)
            return
        if isinstance(action, JoinedWeights) and isinstance(stage, JoiningStage):
            finish = self._completions.counting(action.stage, (0,), drop)
            yield replace(joined_step(action, stage, finish), adds=(0,))
            return
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            for part, call in enumerate(_weight_calls(stage, microbatch)):
                yield Step(action, list, _without_values(call), drop, at_once, adds=(part,))
            return
        fused = action.kind is ActionKind.BACKWARD
        backward = partial(stage.backward if fused else stage.backward_input, microbatch)
        fetch, arrived = self._fetch_grads(action)
        deliver = self._transport.sender(result_of(action))
        adds = tuple(range(_slice_count(stage))) if fused else ()
        yield Step(action, fetch, backward, deliver, arrived, adds=adds)

    def _recomputing(self, action: Action) -> RecomputingStage:
        stage = self._stages[action.stage]
        if not isinstance(stage, RecomputingStage):
            raise PipelineError(
                f"{action} is to run with a RECOMPUTE, but stage {action.stage} cannot run its "
                "forward again: its class has no recompute(), see autosplit.Stage"
            )
        return stage

    def _fetch_inputs(self, action: Action) -> tuple[Fetch, Probe]:
        microbatch = action.microbatch
        receives, arrived = self._receivers(action)
        bring = arguments(
            action.stage, self._transport.feeds, receives, lambda: self._inputs[microbatch]
        )
        if action.stage < self._schedule.stages - 1:
            return bring, arrived
        return lambda: [*bring(), *self._targets[microbatch]], arrived

    def _deliver_outputs(self, action: Action) -> Deliver:
        if action.stage < self._schedule.stages - 1:
            return self._transport.sender(action)

        def keep(outputs: Values) -> None:
            (loss,) = outputs
            # Some kernels put the scalar into memory as large as what they reduced.
            alone = loss.untyped_storage().nbytes() == loss.nbytes
            self._losses[action.microbatch] = loss if alone else loss.clone()

        return keep

    def _fetch_grads(self, action: Action) -> tuple[Fetch, Probe]:
        if action.stage == self._schedule.stages - 1:
            return lambda: [self._loss_grad], at_once
        receives, arrived = self._receivers(action)
        return output_gradients(action.stage, self._transport.feeds, receives), arrived

    def _receivers(self, action: Action) -> tuple[list[Receive], Probe]:
        """The calls that bring what the action needs of other stages; whether all is there."""
        parcels = parcels_for(action, self._transport.feeds)
        pairs = [self._transport.receiver(parcel) for parcel in parcels]
        receives, probes = [receive for receive, _ in pairs], [probe for _, probe in pairs]
        if len(probes) == 1:
            return receives, probes[0]
        return receives, lambda: all(probe() for probe in probes)


def _places(row: Sequence[Action]) -> dict[Action, deque[int]]:
    """Where in a row each action stands; moves may stand there more than once."""
    found: dict[Action, deque[int]] = defaultdict(deque)
    for place, action in enumerate(row):
        found[action].append(place)
    return found


def _slice_count(stage: BackwardStage) -> int:
    return len(stage.slices) if isinstance(stage, SlicedStage) else 1


def _weight_calls(stage: BackwardStage, microbatch: int) -> list[Callable[[], None]]:
    count = _slice_count(stage)
    if not isinstance(stage, SlicedStage) or count == 1:
        return [partial(stage.backward_weight, microbatch)]
    return [partial(stage.backward_weight, microbatch, slice=index) for index in range(count)]


def _without_values(call: Callable[[], None]) -> Compute:
    def compute(values: Values) -> Values:
        call()
        return values

    return compute
