"""Runs one rank's actions of a schedule on its stages, in its order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.moves import Moves
from autosplit.pipeline.engine.stage_protocols import BackwardStage, ForwardStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.engine.timing import Recorder
from autosplit.pipeline.engine.transport import Transport, added, arguments, output_gradients
from autosplit.pipeline.schedule.moves import recomputed
from autosplit.pipeline.schedule.routes import incoming_messages, result_of
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.ranks.first_error import ActionError, LostPeerError, RankActivity
from autosplit.stage import Stage

# --- a rank's row of steps ------------------------------------------------------------------------

Values = list[Any]
"""Tensors, or None where there is no gradient."""


class Step(NamedTuple):
    """An action as bound calls; those that it has no use for are not there.

    Waiting for input is not counted as work.

    Attributes:
        action: what it is.
        compute: the work, on what was fetched if anything is.
        fetch: waits for the action's input.
        deliver: hands on the result.
        waits: wait for what the action needs of moves, and post receives.
        recorded: whether a recorder is to note when it ran; moves note it themselves.
    """

    action: Action
    compute: Callable[..., Any]
    fetch: Callable[[], Values] | None = None
    deliver: Callable[[Values], None] | None = None
    waits: tuple[Callable[[], None], ...] = ()
    recorded: bool = True


class Executor:
    """Runs the actions of ``rank`` on its stages.

    Each action is prepared once, as calls without arguments to look up; a step is a loop over them,
    without autograd.

    Args:
        stages: the rank's stages by index.
        schedule: a legal schedule.
        rank: whose actions to run.
        messages: carries tensors between stages.
        loss_grad: the gradient of each microbatch's loss, a scalar tensor; None if the schedule
            only runs forward.
        place: is told what the rank is doing.
        moves: carries out the schedule's moves, where there are any.
        batch_arguments: of stages the arguments from the batch that need a gradient: a name by
            place.
        seeds: seeds the generators before each call of stages that do not do so themselves, as
            ``Stage`` does.

    Attributes:
        batch_gradients: of the last run the gradients of these, by name and microbatch.
        schedule: see above.
        messages: see above.
        moves: see above.

    Raises:
        PipelineError: the schedule gives this rank a stage that it does not hold, or a backward
            to a stage that has none, or one that cannot run its forward again.
    """

    def __init__(
        self,
        stages: Mapping[int, ForwardStage],
        schedule: Schedule,
        rank: int,
        messages: Transport,
        *,
        loss_grad: Tensor | None,
        place: RankActivity | None = None,
        moves: Moves | None = None,
        batch_arguments: Mapping[int, Mapping[int, Hashable]] = MappingProxyType({}),
        seeds: StageSeeds | None = None,
    ) -> None:
        self._stages, self._batch_arguments = stages, batch_arguments
        self._seeds = seeds
        self.batch_gradients: dict[Any, dict[int, Tensor]] = defaultdict(dict)
        self._last = schedule.stages - 1
        self._rank = rank
        self.messages = messages
        self.schedule = schedule
        self._loss_grad = loss_grad
        self._inputs: list[Values] = [[] for _ in range(schedule.microbatches)]
        self._targets: Sequence[Sequence[Tensor]] = ()
        self._losses: dict[int, Tensor] = {}
        self._recorder: Recorder | None = None
        self._place = RankActivity() if place is None else place
        self.moves = moves
        row = schedule.ranks[rank]
        self._again = recomputed(row)
        self._looked: set[int] = set()
        self._places: dict[Action, deque[int]] = defaultdict(deque)
        for at, action in enumerate(row):  # moves may stand there more than once
            self._places[action].append(at)
        self._row = [*map(self._step, row)]

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
        self._targets, self._losses = targets, {}
        self.batch_gradients.clear()
        for own, given in zip(self._inputs, inputs, strict=False):  # none where no stage takes any
            own[:] = given
        self._recorder = recorder
        action: Action | None = None
        place = self._place
        try:
            if recorder is not None:
                recorder.begin()
            self.messages.begin()
            if self.moves is not None:
                self.moves.begin(self._held_outside)
            for action, compute, fetch, deliver, waits, recorded in self._row:
                place.action, place.waiting = action, True
                place.turn += 1
                for wait in waits:
                    wait()
                # What is fetched is cleared at its last use, and results are not kept here.
                call = compute if fetch is None else partial(compute, fetch())
                place.waiting = False
                place.turn += 1
                if recorder is not None and recorded:
                    call = partial(recorder.run, action, call)
                if deliver is None:
                    call()
                else:
                    deliver(call())
            place.set_action(None, waiting=True)
            if self.moves is not None:
                spans = self.moves.finish()
                if recorder is not None:
                    recorder.note(spans)
            self.messages.finish()
            return dict(sorted(self._losses.items()))
        except (LostPeerError, ActionError):
            raise
        except Exception as error:
            if action is None:
                raise
            raise ActionError(action) from error
        finally:
            place.set_action(None, waiting=False)
            self._targets, self._losses = (), {}
            for own in self._inputs:
                own.clear()

    # --- preparing them ---------------------------------------------------------------------------

    def _step(self, action: Action) -> Step:
        """What an action is, behind what it has to wait for of moves."""
        moves, kind, at = self.moves, action.kind, self._places[action].popleft()
        if kind.is_move:
            if moves is None:
                raise PipelineError(f"{action} is scheduled, and nothing carries out moves")
            return Step(action, partial(moves.start, at), recorded=False)
        need = None if moves is None else moves.needed(at)
        waits = [*([need] if need else []), *self.messages.posts(action)]
        if not kind.is_compute:
            return Step(action, _nothing, waits=tuple(waits), recorded=False)
        step = self._computing(action)
        if self._seeds is not None and not isinstance(self._stages[action.stage], Stage):
            step = step._replace(compute=partial(self._seeds.run, action, step.compute))
        return step._replace(waits=tuple(waits))

    def _computing(self, action: Action) -> Step:
        stage, microbatch, kind = self._stages.get(action.stage), action.microbatch, action.kind
        if stage is None:
            raise PipelineError(
                f"{action} is scheduled on rank {self._rank}, which holds stages "
                f"{sorted(self._stages)}"
            )
        if kind is ActionKind.FORWARD:
            forward: Callable[..., Values] = partial(stage.forward, microbatch)
            if (action.stage, microbatch) in self._again:
                forward = partial(self._recomputing(action).forward, microbatch, keep="inputs")
            # Nobody changes a module within a step; classes of users need not know of that.
            if action.stage in self._looked and type(stage).forward is Stage.forward:
                forward = partial(forward, steady=True)
            self._looked.add(action.stage)
            return Step(action, forward, self._inputs_of(action), self._outputs_to(action))
        if not isinstance(stage, BackwardStage):
            raise PipelineError(f"{action} is scheduled, but stage {action.stage} has no backward")
        if kind.is_memory:
            return Step(action, partial(self._recomputing(action).recompute, microbatch))
        if kind is ActionKind.BACKWARD_WEIGHT:
            return Step(action, partial(stage.backward_weight, microbatch))
        fused = kind is ActionKind.BACKWARD
        backward = partial(stage.backward if fused else stage.backward_input, microbatch)
        return Step(action, backward, self._gradients_of(action), self._gradients_to(action))

    def _recomputing(self, action: Action) -> Any:
        stage = self._stages[action.stage]
        if not hasattr(stage, "recompute"):
            raise PipelineError(
                f"{action} is to run with a RECOMPUTE, but stage {action.stage} cannot run its "
                "forward again: its class has no recompute(), see autosplit.Stage"
            )
        return stage

    def _inputs_of(self, action: Action) -> Callable[[], Values]:
        microbatch, dataflow = action.microbatch, self.messages.dataflow
        receives = [self.messages.receiver(each) for each in incoming_messages(action, dataflow)]
        bring = arguments(action.stage, dataflow, receives, self._inputs[microbatch].copy)
        if action.stage < self._last:
            return bring
        return lambda: [*bring(), *self._targets[microbatch]]

    def _outputs_to(self, action: Action) -> Callable[[Values], None] | None:
        if action.stage < self._last:
            return self.messages.sender(action)

        def keep(outputs: Values) -> None:
            (loss,) = outputs
            # Some kernels put the scalar into memory as large as what they reduced.
            alone = loss.untyped_storage().nbytes() == loss.nbytes
            self._losses[action.microbatch] = loss if alone else loss.clone()

        return keep

    def _gradients_of(self, action: Action) -> Callable[[], Values]:
        if action.stage == self._last:
            return partial(list, (self._loss_grad,))  # a fresh one each time
        dataflow = self.messages.dataflow
        receives = [self.messages.receiver(each) for each in incoming_messages(action, dataflow)]
        return output_gradients(action.stage, dataflow, receives)

    def _gradients_to(self, action: Action) -> Callable[[Values], None] | None:
        send = self.messages.sender(result_of(action))
        names = self._batch_arguments.get(action.stage)
        if not names:
            return send

        def keep(gradients: Values) -> None:
            for place, name in names.items():
                row = self.batch_gradients[name]
                total = added(row.get(action.microbatch), gradients[place])
                if total is not None:
                    row[action.microbatch] = total
            if send is not None:
                send(gradients)

        return keep

    def _held_outside(self, microbatch: int) -> list[Tensor]:
        """Tensors of a microbatch that are held besides by whoever gave them."""
        targets = self._targets[microbatch] if self._targets else ()
        loss_grad = () if self._loss_grad is None else (self._loss_grad,)
        return [*self._inputs[microbatch], *targets, *loss_grad]


def _nothing() -> None:
    """What an AWAIT computes."""
