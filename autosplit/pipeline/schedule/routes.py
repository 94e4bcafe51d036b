"""Dataflow between stages as plain data: the sources of every stage's inputs, and the messages
between ranks, in order, that follow from the sources and a schedule.

A result is named by the action that computes it (see ``result_of``): ``0F1`` stands for the outputs
of stage 0 for microbatch 1, ``1I1`` for the gradients of stage 1's inputs. A full backward B
computes the same gradient for the previous stage as I does, so its result has the name of I.

Schedules order stages as a chain. Tensors may skip stages (see ``Wiring``), but never go against
that order. So a schedule that is legal for a chain is legal for every wiring: a tensor that skips a
stage arrives early and waits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from autosplit.errors import PipelineError

from .schedule import Action, ActionKind, Schedule

T = TypeVar("T")


@dataclass(frozen=True, order=True, slots=True)
class Source:
    """The origin of one input of a stage.

    Attributes:
        stage: an earlier stage, or None for the batch.
        position: the position among the outputs of that stage, or among the batch's inputs.
    """

    stage: int | None
    position: int

    def __str__(self) -> str:
        if self.stage is None:
            return f"the batch's input {self.position}"
        return f"output {self.position} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Wiring:
    """The sources of every stage's inputs, which are earlier stages and the batch.

    An output may go to several stages. Its gradients are added from the last stage to the first, as
    autograd does. Any stage may read an input of the batch; its process reads it from its own
    batch.

    Attributes:
        inputs: per stage, the sources of its module's arguments, in order.
        outputs: the number of output tensors of each stage except the last.
        names: the names of the batch's inputs, in the order of their positions, if a batch has a
            dictionary of inputs; empty if it has a tensor or a tuple.

    Raises:
        PipelineError: no stage; a number of output counts other than one for each stage except the
            last; a source that does not exist when the stage runs; or a repeated name.
    """

    inputs: tuple[tuple[Source, ...], ...]
    outputs: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.inputs or len(self.outputs) != len(self.inputs) - 1:
            raise PipelineError(
                "Wiring: expected inputs with an entry for each stage, at least one, and outputs "
                f"with an entry for each stage but the last; got {len(self.inputs)} and "
                f"{len(self.outputs)} entries"
            )
        if len(set(self.names)) != len(self.names):
            raise PipelineError(
                f"Wiring: names must be different for all inputs of the batch; got {self.names}"
            )
        for stage, sources in enumerate(self.inputs):
            for place, source in enumerate(sources):
                problem = self._problem(stage, source)
                if problem is not None:
                    raise PipelineError(f"input {place} of stage {stage} is {source}: {problem}")

    @property
    def stage_count(self) -> int:
        """The number of stages."""
        return len(self.inputs)

    def _problem(self, stage: int, source: Source) -> str | None:
        if source.stage is None:
            count, noun = len(self.names), "named inputs"
            if source.position >= 0 and not self.names:
                return None
        elif not 0 <= source.stage < stage:
            return f"expected a source in the batch or in a stage before {stage}"
        else:
            count, noun = self.outputs[source.stage], "outputs"
        if 0 <= source.position < count:
            return None
        return f"there are {count} {noun}, counted from 0"


class StageDataflow:
    """The stages from which each stage reads, and to which it sends. Without a wiring, the stages
    are a chain, and the numbers of tensors are unknown.

    Args:
        stages: the number of stages.
        wiring: the sources of inputs; None: each stage reads all outputs of the stage before it,
            and the first stage all inputs of the batch.
    """

    def __init__(self, stages: int, wiring: Wiring | None = None) -> None:
        self.wiring = wiring
        self._stages = stages
        self._sources: list[tuple[int, ...]] = []
        self._targets: list[list[int]] = [[] for _ in wiring.inputs] if wiring else []
        self._positions: dict[tuple[int, int], tuple[int, ...]] = {}
        for stage, inputs in enumerate(wiring.inputs if wiring else ()):
            stage_outputs = sorted({(s.stage, s.position) for s in inputs if s.stage is not None})
            self._sources.append(tuple(dict.fromkeys(source for source, _ in stage_outputs)))
            for source in self._sources[-1]:
                self._targets[source].append(stage)
                self._positions[source, stage] = tuple(p for s, p in stage_outputs if s == source)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """All pairs (source, target) of stages between which tensors travel."""
        for source in range(self._stages):
            yield from ((source, target) for target in self.targets(source))

    def sources(self, stage: int) -> tuple[int, ...]:
        """The stages whose tensors ``stage`` reads, in order."""
        if self.wiring is None:
            return (stage - 1,) if stage else ()
        return self._sources[stage]

    def targets(self, stage: int) -> tuple[int, ...]:
        """The stages that read tensors of ``stage``, in order."""
        if self.wiring is None:
            return (stage + 1,) if stage + 1 < self._stages else ()
        return tuple(self._targets[stage])

    def positions(self, source: int, target: int) -> tuple[int, ...] | None:
        """Positions of the outputs of ``source`` that go to ``target``, each once, in order; None
        for all outputs. Their gradients come back in this order.
        """
        return None if self.wiring is None else self._positions[source, target]

    def select(self, outputs: Sequence[T], source: int, target: int) -> Sequence[T]:
        """From one value for each output of ``source``, select the values of the outputs that
        ``target`` reads.
        """
        positions = self.positions(source, target)
        return outputs if positions is None else [outputs[position] for position in positions]

    def places(self, source: int, target: int) -> list[list[int]] | None:
        """For each output of ``source`` that goes to ``target``, its positions among the inputs of
        ``target``; None if the inputs are these outputs in order.
        """
        if self.wiring is None:
            return None
        sources = [(input.stage, input.position) for input in self.wiring.inputs[target]]
        return [
            [place for place, pair in enumerate(sources) if pair == (source, position)]
            for position in self._positions[source, target]
        ]

    def shared_places(self, stage: int) -> tuple[int, ...]:
        """Positions of the arguments of ``stage`` that other stages read as well."""
        if self.wiring is None:
            return ()
        takers = Counter(source for sources in self.wiring.inputs for source in sources)
        stage_inputs = self.wiring.inputs[stage]
        return tuple(place for place, source in enumerate(stage_inputs) if takers[source] > 1)

    def from_batch(self, stages: Iterable[int]) -> frozenset[int] | None:
        """Positions of the batch's inputs that these stages read; None for all inputs."""
        if self.wiring is None:
            return None if 0 in stages else frozenset()
        inputs = (source for stage in stages for source in self.wiring.inputs[stage])
        return frozenset(source.position for source in inputs if source.stage is None)

    def batch_places(self, stage: int, position: int) -> list[int]:
        """The positions, among the arguments of a stage, of the batch's input ``position``."""
        if self.wiring is None:
            return [] if stage else [position]
        sources = enumerate(self.wiring.inputs[stage])
        return [at for at, source in sources if source == Source(None, position)]

    @property
    def first_from_batch(self) -> int:
        """The first stage that reads an input of the batch; 0 if no stage does."""
        none = frozenset[int]()
        takers = (stage for stage in range(self._stages) if self.from_batch([stage]) != none)
        return next(takers, 0)

    def check_outputs(self, stage: int, count: int) -> None:
        """Refuse a stage whose number of outputs differs from the wiring.

        Raises:
            PipelineError: the number differs; the text has the expected number.
        """
        if self.wiring is None or stage == self.wiring.stage_count - 1:
            return
        expected = self.wiring.outputs[stage]
        if count != expected:
            raise PipelineError(
                f"stage {stage} returned {count} tensors, but Wiring.outputs has {expected} for "
                "it: return as many, or change the wiring"
            )


# --- messages -------------------------------------------------------------------------------------


def result_of(action: Action) -> Action:
    """The name of the result of ``action``: the action itself, or I for a B."""
    if action.kind is ActionKind.BACKWARD:
        return Action(action.stage, ActionKind.BACKWARD_INPUT, action.microbatch)
    return action


def needs_of(action: Action, dataflow: StageDataflow) -> tuple[Action, ...]:
    """The results that must exist before ``action`` starts. A result of the action's own stage
    comes first.

    F needs the outputs of earlier stages. I and B need F of their stage and the input gradients of
    later stages. W needs I, and RECOMPUTE needs F. For moves, see the file ``moves.py``.
    """
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is ActionKind.FORWARD:
        return tuple([Action(source, kind, microbatch) for source in dataflow.sources(stage)])
    if kind is ActionKind.BACKWARD_WEIGHT:
        return (Action(stage, ActionKind.BACKWARD_INPUT, microbatch),)
    if kind is ActionKind.BACKWARD_INPUT or kind is ActionKind.BACKWARD:
        inputs = ActionKind.BACKWARD_INPUT
        gradients = [Action(target, inputs, microbatch) for target in dataflow.targets(stage)]
        return (Action(stage, ActionKind.FORWARD, microbatch), *gradients)
    if kind.is_compute:  # the forward once more
        return (Action(stage, ActionKind.FORWARD, microbatch),)
    return ()


class StageMessage(NamedTuple):
    """The tensors that one stage sends another for one microbatch: outputs, or their gradients.

    Attributes:
        result: the action whose result the tensors are.
        stage: the stage that receives the tensors.
    """

    result: Action
    stage: int

    def __str__(self) -> str:
        return str(self.result)

    @property
    def forward(self) -> bool:
        """True for outputs, False for gradients."""
        return self.result.kind is ActionKind.FORWARD

    @property
    def boundary(self) -> int:
        """The boundary that the message crosses, as the number of the stage before the boundary."""
        return self.result.stage if self.forward else self.stage

    @property
    def taker(self) -> int:
        """The stage after the boundary that the message crosses."""
        return self.stage if self.forward else self.result.stage

    @property
    def crossing(self) -> tuple[int, int, bool]:
        """(stage before the boundary, stage after it, whether the message carries outputs)."""
        return self.boundary, self.taker, self.forward

    @property
    def send(self) -> Action:
        """The sender's action for the message in torch's schedules, such as ``0SEND_F1``."""
        kind = ActionKind.SEND_F if self.forward else ActionKind.SEND_B
        return Action(self.result.stage, kind, self.result.microbatch)

    @property
    def receive(self) -> Action:
        """The receiver's action for the message in torch's schedules, such as ``1RECV_F1``."""
        kind = ActionKind.RECV_F if self.forward else ActionKind.RECV_B
        return Action(self.stage, kind, self.result.microbatch)


@dataclass(frozen=True)
class Routes:
    """The sends and receives of one rank in one step.

    Attributes:
        dataflow: the dataflow between stages.
        sends: per peer, the messages to it, in the order in which they are computed; messages of
            one action are in the order of the receiving stages.
        receives: per peer, the messages from it, in the peer's order.
        acked_sends: for each received message, the number k of sends to its sender that it
            acknowledges. The sender must have used the first k of ``sends`` to compute the message,
            so waiting for these k sends costs nothing.
    """

    dataflow: StageDataflow
    sends: dict[int, tuple[StageMessage, ...]]
    receives: dict[int, tuple[StageMessage, ...]]
    acked_sends: dict[StageMessage, int]


def sender_and_receiver(message: StageMessage, schedule: Schedule) -> tuple[int, int]:
    """The ranks that send and receive a message."""
    return schedule.placement[message.result.stage], schedule.placement[message.stage]


def routes_of(schedule: Schedule, dataflow: StageDataflow | None = None) -> list[Routes]:
    """The sends and receives of every rank under a legal schedule.

    Args:
        schedule: a legal schedule.
        dataflow: the dataflow between stages; None: a chain.
    """
    dataflow = dataflow or StageDataflow(schedule.stages)
    routes = [Routes(dataflow, {}, {}, {}) for _ in schedule.ranks]
    traffic: dict[tuple[int, int], dict[StageMessage, int]] = defaultdict(dict)
    for rank, row in enumerate(schedule.ranks):
        for place, action in enumerate(row):
            for message in outgoing_messages(result_of(action), dataflow):
                target = schedule.placement[message.stage]
                if target != rank:
                    traffic[rank, target][message] = place
    first_uses = [_first_uses(row, dataflow) for row in schedule.ranks]
    for source, target in sorted(traffic):
        outgoing, incoming = traffic[source, target], tuple(traffic.get((target, source), ()))
        routes[source].sends[target] = routes[target].receives[source] = tuple(outgoing)
        count = 0
        for message, sent_at in outgoing.items():
            while count < len(incoming) and first_uses[source][incoming[count]] <= sent_at:
                count += 1
            routes[target].acked_sends[message] = count
    return routes


def outgoing_messages(result: Action, dataflow: StageDataflow) -> tuple[StageMessage, ...]:
    """The messages with a result: one for each stage that reads it."""
    if result.kind is ActionKind.FORWARD:
        return tuple(StageMessage(result, stage) for stage in dataflow.targets(result.stage))
    if result.kind is ActionKind.BACKWARD_INPUT:
        return tuple(StageMessage(result, stage) for stage in dataflow.sources(result.stage))
    return ()


def incoming_messages(action: Action, dataflow: StageDataflow) -> tuple[StageMessage, ...]:
    """The messages that ``action`` needs: one per sending stage, in the order of the stages."""
    stage = action.stage
    return tuple(
        StageMessage(need, stage) for need in needs_of(action, dataflow) if need.stage != stage
    )


def _first_uses(row: Sequence[Action], dataflow: StageDataflow) -> dict[StageMessage, int]:
    """For each message that a rank needs, the place of the first action that needs it."""
    uses: dict[StageMessage, int] = {}
    for place, action in enumerate(row):
        for message in incoming_messages(action, dataflow):
            uses.setdefault(message, place)
    return uses
