"""Data flow between stages, as plain data: where the inputs of every stage come from, and the
traffic between ranks that follows from that and a schedule, in order.

A result is named by the action that makes it (see ``result_of``): ``0F1`` stands for the
outputs of stage 0 for microbatch 1, ``1I1`` for the gradients of stage 1's inputs. Schedules order
stages as a chain. Tensors may go past the next stage (see ``Wiring``), but never against that
order, so a schedule that is legal for a chain is so for every wiring: what skips a stage arrives
early and waits.

What an action needs before it can start, and what it makes, is the dependency model. Both are
named by actions. A full backward B makes the same gradient for the previous stage as I does, so its
result goes by the name of I. Which stages feed which is for ``Feeds`` to say.
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
    """Where one input of a stage comes from.

    Attributes:
        stage: an earlier stage, or None for the batch.
        position: which output of that stage, or which tensor of the batch's inputs.
    """

    stage: int | None
    position: int

    def __str__(self) -> str:
        if self.stage is None:
            return f"the batch's input {self.position}"
        return f"output {self.position} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Wiring:
    """The inputs of every stage. Stages are in order: each takes only from earlier ones.

    An output may go to several stages; the gradients that come back are added up from the last
    of them to the first, as autograd does. What the batch gives, any stage may take; the process
    that holds it takes it from its own batch.

    Attributes:
        inputs: per stage, the sources of its module's arguments, in order.
        outputs: how many output tensors each stage but the last has.
        names: the names of the batch's inputs in the order of their positions, where a batch
            gives them as a dictionary; empty where it gives a tensor or a tuple.

    Raises:
        PipelineError: no stage; not one count of outputs for each stage but the last; a source
            that is not there when the stage runs; or one name twice.
    """

    inputs: tuple[tuple[Source, ...], ...]
    outputs: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.inputs or len(self.outputs) != len(self.inputs) - 1:
            raise PipelineError(
                "a wiring has the inputs of one stage or more, and the number of outputs of each "
                f"but the last; got those of {len(self.inputs)} and {len(self.outputs)} stages"
            )
        if len(set(self.names)) != len(self.names):
            raise PipelineError(f"each input of the batch has a name of its own; got {self.names}")
        for stage, sources in enumerate(self.inputs):
            for place, source in enumerate(sources):
                problem = self._problem(stage, source)
                if problem is not None:
                    raise PipelineError(f"input {place} of stage {stage} is {source}: {problem}")

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.inputs)

    def _problem(self, stage: int, source: Source) -> str | None:
        if source.stage is None:
            count, what = len(self.names), "named inputs"
            if source.position >= 0 and not self.names:
                return None
        elif not 0 <= source.stage < stage:
            return f"it can take from the batch and from stages before {stage}"
        else:
            count, what = self.outputs[source.stage], "outputs"
        if 0 <= source.position < count:
            return None
        return f"there are {count} {what}, counted from 0"


class Feeds:
    """Producers and consumers of every stage; without a wiring, a chain of unknown tensor counts.

    Args:
        stages: how many stages there are.
        wiring: the data flow; None: each stage takes all outputs of the one before, and the first
            all that the batch gives.
    """

    def __init__(self, stages: int, wiring: Wiring | None = None) -> None:
        self.wiring = wiring
        self._stages = stages
        self._sources: list[tuple[int, ...]] = []
        self._targets: list[list[int]] = [[] for _ in wiring.inputs] if wiring else []
        self._positions: dict[tuple[int, int], tuple[int, ...]] = {}
        for stage, inputs in enumerate(wiring.inputs if wiring else ()):
            taken = sorted({(s.stage, s.position) for s in inputs if s.stage is not None})
            self._sources.append(tuple(dict.fromkeys(source for source, _ in taken)))
            for source in self._sources[-1]:
                self._targets[source].append(stage)
                self._positions[source, stage] = tuple(p for s, p in taken if s == source)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """All pairs of stages between which tensors travel, source first."""
        for source in range(self._stages):
            yield from ((source, target) for target in self.targets(source))

    def sources(self, stage: int) -> tuple[int, ...]:
        """The stages that ``stage`` takes tensors from, in order."""
        if self.wiring is None:
            return (stage - 1,) if stage else ()
        return self._sources[stage]

    def targets(self, stage: int) -> tuple[int, ...]:
        """The stages that take tensors from ``stage``, in order."""
        if self.wiring is None:
            return (stage + 1,) if stage + 1 < self._stages else ()
        return tuple(self._targets[stage])

    def positions(self, source: int, target: int) -> tuple[int, ...] | None:
        """Which outputs of ``source`` go to ``target``, and their gradients back, each once, in
        order; None for all.
        """
        return None if self.wiring is None else self._positions[source, target]

    def select(self, outputs: Sequence[T], source: int, target: int) -> Sequence[T]:
        """Of one value for each output of ``source``, the values of those that ``target`` takes."""
        positions = self.positions(source, target)
        return outputs if positions is None else [outputs[position] for position in positions]

    def places(self, source: int, target: int) -> list[list[int]] | None:
        """For each output of ``source`` that goes to ``target``, its places among the inputs of
        that; None where they are as they come.
        """
        if self.wiring is None:
            return None
        sources = [(each.stage, each.position) for each in self.wiring.inputs[target]]
        return [
            [place for place, each in enumerate(sources) if each == (source, position)]
            for position in self._positions[source, target]
        ]

    def shared_places(self, stage: int) -> tuple[int, ...]:
        """Which arguments of ``stage`` others may take as well; none in a chain."""
        if self.wiring is None:
            return ()
        every = Counter(source for sources in self.wiring.inputs for source in sources)
        own = self.wiring.inputs[stage]
        return tuple(place for place, source in enumerate(own) if every[source] > 1)

    def from_batch(self, stages: Iterable[int]) -> frozenset[int] | None:
        """Which of the batch's inputs these stages take; None for all."""
        if self.wiring is None:
            return None if 0 in stages else frozenset()
        inputs = (source for stage in stages for source in self.wiring.inputs[stage])
        return frozenset(source.position for source in inputs if source.stage is None)

    @property
    def first_from_batch(self) -> int:
        """The first stage that takes any of the batch's inputs; 0 if none does."""
        none = frozenset[int]()
        takers = (stage for stage in range(self._stages) if self.from_batch([stage]) != none)
        return next(takers, 0)

    def check_outputs(self, stage: int, count: int) -> None:
        """Refuse a stage with another number of outputs than the wiring says.

        Raises:
            PipelineError: says both numbers.
        """
        if self.wiring is None or stage == self.wiring.stages - 1:
            return
        said = self.wiring.outputs[stage]
        if count != said:
            raise PipelineError(f"stage {stage} puts out {count} tensors; the wiring says {said}")


# --- what travels ---------------------------------------------------------------------------------


def result_of(action: Action) -> Action:
    """The name of what ``action`` makes: the action itself, or I for a B."""
    if action.kind is ActionKind.BACKWARD:
        return Action(action.stage, ActionKind.BACKWARD_INPUT, action.microbatch)
    return action


def needs_of(action: Action, feeds: Feeds) -> tuple[Action, ...]:
    """The results that must exist before ``action`` starts: its own stage's first.

    F needs the outputs of the stages before it, I and B need their own F and the input gradients
    of the stages behind it, W needs its own I, RECOMPUTE its own F. What
    moves need of each other is in ``moves``.
    """
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is ActionKind.FORWARD:
        return tuple([Action(source, kind, microbatch) for source in feeds.sources(stage)])
    if kind is ActionKind.BACKWARD_WEIGHT:
        return (Action(stage, ActionKind.BACKWARD_INPUT, microbatch),)
    if kind is ActionKind.BACKWARD_INPUT or kind is ActionKind.BACKWARD:
        inputs = ActionKind.BACKWARD_INPUT
        behind = [Action(target, inputs, microbatch) for target in feeds.targets(stage)]
        return (Action(stage, ActionKind.FORWARD, microbatch), *behind)
    if kind.is_compute:  # the forward once more
        return (Action(stage, ActionKind.FORWARD, microbatch),)
    return ()


class Parcel(NamedTuple):
    """The tensors that one stage sends another for one microbatch: outputs, or gradients of such.

    ``result`` names it, ``stage`` is where it goes.
    """

    result: Action
    stage: int

    def __str__(self) -> str:
        return str(self.result)

    @property
    def forward(self) -> bool:
        """Whether these are outputs, rather than gradients."""
        return self.result.kind is ActionKind.FORWARD

    @property
    def boundary(self) -> int:
        """The stage whose outputs these are, or the gradients of whose outputs."""
        return self.result.stage if self.forward else self.stage

    @property
    def taker(self) -> int:
        """The stage at the other end of that boundary."""
        return self.stage if self.forward else self.result.stage

    @property
    def send(self) -> Action:
        """What its sender does, as torch lists it."""
        kind = ActionKind.SEND_F if self.forward else ActionKind.SEND_B
        return Action(self.result.stage, kind, self.result.microbatch)

    @property
    def receive(self) -> Action:
        """What its receiver does."""
        kind = ActionKind.RECV_F if self.forward else ActionKind.RECV_B
        return Action(self.stage, kind, self.result.microbatch)


@dataclass(frozen=True)
class Routes:
    """The sends and receives of one rank in one step.

    Attributes:
        feeds: who feeds whom.
        sends: per peer, what goes to it, in the order in which it is made; what one action makes
            for several stages goes in their order.
        receives: per peer, what comes from it, in the order in which it sends.
        proven: for what comes, how many of the parcels sent to its maker (the first k of
            ``sends``) that rank must have taken before it could make this one. Once it is here,
            waiting for those sends to complete costs nothing.
    """

    feeds: Feeds
    sends: dict[int, tuple[Parcel, ...]]
    receives: dict[int, tuple[Parcel, ...]]
    proven: dict[Parcel, int]


def ends_of(parcel: Parcel, schedule: Schedule) -> tuple[int, int]:
    """The rank that makes a parcel, and the one that it goes to."""
    made = parcel.result
    return (
        schedule.placement[made.stage],
        schedule.placement[parcel.stage],
    )


def routes_of(schedule: Schedule, feeds: Feeds | None = None) -> list[Routes]:
    """The traffic of every rank under a legal ``schedule``; without ``feeds``, that of a chain."""
    feeds = feeds or Feeds(schedule.stages)
    routes = [Routes(feeds, {}, {}, {}) for _ in schedule.ranks]
    made: dict[tuple[int, int], dict[Parcel, int]] = defaultdict(dict)
    for rank, row in enumerate(schedule.ranks):
        for place, action in enumerate(row):
            for parcel in parcels_of(result_of(action), feeds):
                target = schedule.placement[parcel.stage]
                if target != rank:
                    made[rank, target][parcel] = place
    taken = [_first_uses(row, feeds) for row in schedule.ranks]
    for source, target in sorted(made):
        sent, back = made[source, target], tuple(made.get((target, source), ()))
        routes[source].sends[target] = routes[target].receives[source] = tuple(sent)
        count = 0
        for parcel, made_at in sent.items():
            while count < len(back) and taken[source][back[count]] <= made_at:
                count += 1
            routes[target].proven[parcel] = count
    return routes


def pairs_of(schedule: Schedule, feeds: Feeds) -> set[tuple[int, int]]:
    """The pairs of ranks, the lower one first, between which something travels."""
    found = set()
    for stage in range(schedule.stages):
        for taker in feeds.targets(stage):
            ends = schedule.placement[stage], schedule.placement[taker]
            found.add((min(ends), max(ends)))
    return {(low, high) for low, high in found if low != high}


def parcels_of(result: Action, feeds: Feeds) -> tuple[Parcel, ...]:
    """What becomes of a result: one parcel for each stage that it goes to."""
    if result.kind is ActionKind.FORWARD:
        return tuple(Parcel(result, stage) for stage in feeds.targets(result.stage))
    if result.kind is ActionKind.BACKWARD_INPUT:
        return tuple(Parcel(result, stage) for stage in feeds.sources(result.stage))
    return ()


def parcels_for(action: Action, feeds: Feeds) -> tuple[Parcel, ...]:
    """What ``action`` needs of other stages: one parcel of each, in the order of the stages."""
    stage = action.stage
    return tuple(Parcel(need, stage) for need in needs_of(action, feeds) if need.stage != stage)


def _first_uses(row: Sequence[Action], feeds: Feeds) -> dict[Parcel, int]:
    """For what a rank needs, the place of the first action that needs it."""
    uses: dict[Parcel, int] = {}
    for place, action in enumerate(row):
        for parcel in parcels_for(action, feeds):
            uses.setdefault(parcel, place)
    return uses
