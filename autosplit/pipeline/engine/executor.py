"""Runs one rank's actions of a schedule on its stages, in its order."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.schedule.action import Action, ActionKind, JoinedWeights
from autosplit.pipeline.schedule.dependency import result_of
from autosplit.pipeline.schedule.moves import recomputed
from autosplit.pipeline.schedule.routes import parcels_for
from autosplit.pipeline.schedule.schedule import Schedule

from .first_error import ActionError, LostPeerError, RankActivity
from .moves import MicrobatchMoves
from .timing import Recorder
from .transport import (
    Probe,
    Receive,
    Transport,
    arguments,
    output_gradients,
)


class ForwardStage(Protocol):
    """What a stage must offer to run forward."""

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        """Outputs for ``inputs``; clears the list, so that each input dies at its last use."""
        ...


@runtime_checkable
class BackwardStage(ForwardStage, Protocol):
    """What a stage must offer to run backward; see ``autosplit.stage.Stage``.

    Gradients come and go as lists with one entry per output or input, None where there is none.
    """

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Input gradients; clears the list it is given."""
        ...

    def backward_weight(self, microbatch: int) -> None:
        """Add the weight gradients to the stage's accumulators."""
        ...

    def backward(self, microbatch: int, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        """Both halves in one call; clears the list it is given."""
        ...


@runtime_checkable
class SlicedStage(BackwardStage, Protocol):
    """A stage whose W can be run in parts, one after another."""

    @property
    def slices(self) -> Sequence[object]:
        """One entry for each slice."""
        ...

    def backward_weight(self, microbatch: int, slice: int | None = None) -> None:
        """Add one slice of the weight gradients; None for all of them."""
        ...


@runtime_checkable
class PartlyPublishedStage(SlicedStage, Protocol):
    """A stage whose gradients can be taken slice by slice."""

    @property
    def slices(self) -> Sequence[Sequence[str]]:
        """For each slice the parameters, of ``module``, whose gradients it adds."""
        ...

    @property
    def module(self) -> nn.Module:
        """What it was made of."""
        ...

    def publish(self, names: Collection[str] | None = None) -> None:
        """Add the gradients of these parameters to their ``.grad`` and forget them; None: all."""
        ...


@runtime_checkable
class RecomputingStage(BackwardStage, Protocol):
    """A stage that can run F again, from its inputs."""

    def forward(
        self, microbatch: int, inputs: list[Tensor], keep: Literal["saved", "inputs"] = "saved"
    ) -> list[Tensor]:
        """As without ``keep``; with "inputs", nothing else is kept."""
        ...

    def recompute(self, microbatch: int) -> None:
        """Make again what F saves for the backward."""
        ...


class Shards(Protocol):
    """The stages of a rank whose parameters are sharded."""

    @property
    def stages(self) -> Collection[int]:
        """Which they are."""
        ...

    def gather(self, stage: int) -> None:
        """Gather the parameters of a stage."""
        ...

    def free(self, stage: int) -> None:
        """Free them."""
        ...


Values = list[Any]
"""Tensors, or None where there is no gradient; a weight half takes and gives nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """An action as fetch, compute and deliver, so that waiting for input is not counted as work.

    Attributes:
        action: what it is.
        fetch: waits for the action's input.
        compute: the work.
        deliver: hands on the result.
        arrived: whether ``fetch`` would return at once.
        adds: of its stage's weight gradients the slices that it adds to.
        calls: for several W that a stage may run together, the steps to run in place of this one:
            known only when it is their turn, by what their microbatches left.
    """

    action: Action
    fetch: Callable[[], Values]
    compute: Callable[[Values], Values]
    deliver: Callable[[Values], None]
    arrived: Callable[[], bool]
    calls: Callable[[], Sequence[Step]] | None = None
    adds: tuple[int, ...] = ()


def drop(values: Values) -> None:
    """Delivery of a step whose results nobody takes."""


def at_once() -> bool:
    """Arrival of a step that waits for nothing."""
    return True


def behind(
    step: Step, needs: Sequence[Callable[[], None]], arrived: Sequence[Callable[[], bool]]
) -> Step:
    """The step, behind calls that wait for what it needs; ``arrived`` say whether they would."""
    fetch, calls = step.fetch, step.calls

    def wait() -> None:
        for need in needs:
            need()

    def fetch_behind() -> Values:
        wait()
        return fetch()

    def calls_behind() -> Sequence[Step]:
        wait()
        return () if calls is None else calls()

    return replace(
        step,
        fetch=fetch_behind if calls is None else fetch,
        arrived=lambda: step.arrived() and all(each() for each in arrived),
        calls=None if calls is None else calls_behind,
    )


def slices_together(steps: Sequence[Step]) -> list[Step]:
    """The same steps, but of each stage's last Ws that stand next to each other, the first slice of
    all before the second: its gradients are complete, and may be reduced, while others are made.

    Each slice's gradients are added up in the same order as before.
    """
    row = list(steps)
    ends: dict[int, int] = {}
    for place, step in enumerate(row):
        if step.adds:
            ends[step.action.stage] = place
    for stage, end in ends.items():
        start = end
        while start >= 0 and _runs_weight(row[start]) and row[start].action.stage == stage:
            start -= 1
        row[start + 1 : end + 1] = sorted(row[start + 1 : end + 1], key=lambda step: step.adds)
    return row


def _runs_weight(step: Step) -> bool:
    return _is_weight(step.action)


Deliver = Callable[[Values], None]
Finished = Callable[[int, int], None]
"""Is told a stage and the number of a slice; a stage without slices has slice 0."""


class WeightCompletions:
    """Counts what adds to each slice's weight gradients, step by step.

    Args:
        finished: hears of each slice when its last gradients are there; None: nobody does.

    Attributes:
        order: stages and slices as they are finished, if steps run in the order of ``counted``.
    """

    def __init__(self, finished: Finished | None) -> None:
        self._finished = finished
        self._parts: Counter[tuple[int, int]] = Counter()
        self._left: Counter[tuple[int, int]] = Counter()
        self.order: tuple[tuple[int, int], ...] = ()

    def begin(self) -> None:
        """Start a step."""
        self._left = self._parts.copy()

    def counted(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """The steps of a row, each with the news of what it finishes."""
        added = [(step.action.stage, part) for step in steps for part in step.adds]
        self._parts = Counter(added)
        self.order = tuple(reversed(dict.fromkeys(reversed(added))))
        return tuple(
            # Those with calls of their own count these.
            replace(step, deliver=self.counting(step.action.stage, step.adds, step.deliver))
            if step.adds and step.calls is None
            else step
            for step in steps
        )

    def counting(self, stage: int, parts: Sequence[int], deliver: Deliver) -> Deliver:
        """``deliver``, and the news that slices of a stage are finished when nothing is left."""
        finished = self._finished
        if finished is None:
            return deliver

        def counted(values: Values) -> None:
            deliver(values)
            for part in parts:
                self._left[stage, part] -= 1
                if not self._left[stage, part]:
                    finished(stage, part)

        return counted


@runtime_checkable
class JoiningStage(Protocol):
    """A stage that may run W of several microbatches in one call."""

    @property
    def joins_weights(self) -> bool:
        """Whether it ever does."""
        ...

    def weight_calls(self, microbatches: Sequence[int]) -> list[list[int]]:
        """Which of these W, in this order, go together: the microbatches of each call."""
        ...

    def backward_weight(self, microbatch: int | Sequence[int]) -> None:
        """Add the weight gradients of one microbatch, or of several in the order given."""
        ...


def join_adjacent_weights(row: Iterable[Action], stages: Mapping[int, object]) -> Iterator[Action]:
    """A rank's actions, with W of one stage next to each other as one action where the stage can
    run them together.

    Where a rank holds several stages, Ws of others may stand in between: in a stretch of Ws nothing
    waits for any of them, so a stage's later ones move up to its first.

    Args:
        row: the actions in order.
        stages: the rank's stages by index.
    """
    joining = {
        index
        for index, stage in stages.items()
        if isinstance(stage, JoiningStage) and stage.joins_weights
    }

    for are_weights, actions in groupby(row, _is_weight):
        if not (are_weights and joining):
            yield from actions
            continue
        groups: dict[Action | int, list[Action]] = {}
        for action in actions:
            key = action.stage if action.stage in joining else action
            groups.setdefault(key, []).append(action)
        yield from map(JoinedWeights.of, groups.values())


def joined_step(
    action: JoinedWeights, stage: JoiningStage, finish: Callable[[Values], None]
) -> Step:
    """The step of some W next to each other.

    Its calls are known only when it is their turn: microbatches whose forwards ran different
    graphs, because the module changed in between, do not go together.

    Args:
        action: these W.
        stage: theirs.
        finish: is called behind the last of them.
    """

    def calls() -> list[Step]:
        groups = stage.weight_calls(action.microbatches)
        steps = []
        for group in groups:
            weights = [Action(action.stage, action.kind, each) for each in group]
            deliver = finish if group is groups[-1] else drop
            compute = partial(_run, stage, group)
            steps.append(Step(JoinedWeights.of(weights), list, compute, deliver, at_once))
        return steps

    return Step(action, list, _as_it_is, drop, at_once, calls)


def _is_weight(action: Action) -> bool:
    return action.kind is ActionKind.BACKWARD_WEIGHT


def _run(stage: JoiningStage, microbatches: Sequence[int], values: Values) -> Values:
    stage.backward_weight(microbatches)
    return values


def _as_it_is(values: Values) -> Values:
    return values


Fetch = Callable[[], Values]
Compute = Callable[[Values], Values]

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
        if finished is not None:
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
            for step in self._steps:
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
