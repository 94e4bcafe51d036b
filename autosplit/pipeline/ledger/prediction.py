"""Predicted peak of a rank: what its microbatches hold, what its calls take beside that while they
run, and what its messages hold.

What each call takes, makes and lets go of is in its graph. So one microbatch of a stage is played
by itself, with memory instead of tensors, and told as a ``StageMemory``; how much of that a rank
has at once is counted from there as for any schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autosplit.passes import Kind, Role
from autosplit.pipeline.engine.boundaries import Boundaries, TensorMeta
from autosplit.pipeline.schedule.routes import (
    Feeds,
    Parcel,
    parcels_for,
    parcels_of,
    result_of,
    routes_of,
)
from autosplit.pipeline.schedule.schedule import BACKWARDS, Action, ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.playing import posts_of
from autosplit.stage import Stage

from .call_memory import CallMemory


@dataclass(frozen=True, eq=False)
class _Memory:
    """A storage of a microbatch; of equal ones each is its own."""

    bytes: int


_Held = Mapping[Role, _Memory]


class StageBytes:
    """What one microbatch of a stage holds, played call by call.

    Args:
        stage: whose.
        calls: knows what calls hold.
        received: bytes of each input that another stage sends, by name; the others lie in the
            batch.
        kinds: of the actions that run.

    Attributes:
        memory: of its calls, what they take of messages with them, and between them.
        lent: places of outputs in memory that the stage keeps, or the batch's, for as long as a
            message needs it.
        fresh: by how much less a call takes that makes gradients, rather than adds to them.
    """

    def __init__(
        self,
        stage: Stage,
        calls: CallMemory,
        received: Mapping[str, int],
        kinds: Collection[ActionKind],
    ) -> None:
        self._stage, self._calls = stage, calls
        self.fresh: dict[ActionKind, int] = {}
        functions = stage.functions
        inputs = {Role(Kind.INPUT, name): _Memory(size) for name, size in received.items()}
        most, made = self._call(ActionKind.FORWARD, inputs)
        saved = {role: each for role, each in made.items() if role.kind is Kind.SAVED}
        outputs = [made.get(Role(Kind.OUTPUT, name)) for name in functions.capture.outputs]
        self.lent = {at for at, o in enumerate(outputs) if o is None or o in saved.values()}
        kept, deferred = _bytes(saved), 0
        forward, backward_input, backward_weight, backward = _bytes(inputs) + most - kept, 0, 0, 0
        tangents = {
            Role(Kind.TANGENT, name): _Memory(spec.shape.numel() * spec.dtype.itemsize)
            for name, spec in functions.tangent_specs.items()
        }
        taken, arrived = {**saved, **tangents}, _bytes(tangents)
        if functions.has_backward and ActionKind.BACKWARD_INPUT in kinds:
            most, made = self._call(ActionKind.BACKWARD_INPUT, taken)
            left = {role: each for role, each in made.items() if role.kind is not Kind.INPUT_GRAD}
            deferred = _bytes(left)
            backward_input = kept + arrived + most - max(kept, deferred)
            backward_weight, _ = self._call(ActionKind.BACKWARD_WEIGHT, left)
        if functions.has_backward and ActionKind.BACKWARD in kinds:
            most, _ = self._call(ActionKind.BACKWARD, taken)
            backward = arrived + most
        self.memory = StageMemory(
            kept,
            deferred,
            _bytes(inputs),
            again=calls.again(stage),
            generators=calls.generators,
            workspace=(forward, backward_input, backward_weight, backward),
        )

    def _call(self, kind: ActionKind, taken: _Held) -> tuple[int, dict[Role, _Memory]]:
        """The most bytes that are alive in a call beside what there is before, and what it makes;
        of gradients, which are fixed (see ``Band``), only what adding to them takes.
        """
        name = BACKWARDS.get(kind, "forward")
        live = self._calls.of(self._stage, name)
        if kind is ActionKind.BACKWARD and not live.takes.issuperset(taken):
            # Where I passes on what it takes, B runs the graph of W.
            passed = self._calls.of(self._stage, "backward_input").results
            names = {each.memory: each.role for each in passed}
            taken = {names.get(role, role): each for role, each in taken.items()}
        roles: dict[_Memory, set[Role]] = defaultdict(set)
        for role, each in taken.items():
            roles[each].add(role)
        dying = [(names, each.bytes) for each, names in roles.items()]
        borrowed = self._stage.functions.dependence.borrowed
        gradients: dict[_Memory | int, int] = {}
        made: dict[Role, _Memory] = {}
        new: dict[int, _Memory] = {}
        for result in live.results:
            role, memory = result.role, result.memory
            if isinstance(memory, int):
                if role.kind is Kind.PARAMETER_GRAD:
                    gradients[memory] = result.bytes
                else:
                    made[role] = new.setdefault(memory, _Memory(result.bytes))
            elif memory is not None and memory in taken:
                if role.kind is not Kind.PARAMETER_GRAD:
                    made[role] = taken[memory]
                elif role.name not in borrowed:  # made by I; the sum from now on
                    gradients[taken[memory]] = result.bytes
        most = fresh = live.peak(dying) - sum(gradients.values())
        if gradients:
            most = max(most, self._calls.of(self._stage, name, adds=True).peak(dying))
        self.fresh[kind] = most - fresh
        return most, made


def _bytes(held: _Held) -> int:
    return sum(each.bytes for each in {*held.values()})


def received_bytes(stage: Stage, feeds: Feeds, boundaries: Boundaries) -> dict[str, int]:
    """Bytes of each input of a stage that another one sends, by name."""
    sources = feeds.sources(stage.index)
    metas: dict[tuple[int | None, int], TensorMeta] = {
        (source, position): meta
        for source in sources
        for position, meta in enumerate(boundaries.known[source])
    }
    names = stage.functions.capture.inputs  # behind these are the targets, of the batch
    taken: list[tuple[int | None, int]] = [*metas]
    if feeds.wiring is not None:
        taken = [(each.stage, each.position) for each in feeds.wiring.inputs[stage.index]]
    pairs = zip(names, taken, strict=False)
    return {name: _size(metas[key]) for name, key in pairs if key in metas}


def message_levels(
    schedule: Schedule,
    rank: int,
    feeds: Feeds,
    boundaries: Boundaries,
    lent: Mapping[int, Collection[int]],
) -> list[int]:
    """What a rank's messages hold, as ``Transport`` has them: for each action of its row, while it
    runs.

    Args:
        schedule: what is run.
        rank: whose messages.
        feeds: who feeds whom.
        boundaries: what stages put out and get back.
        lent: by stage of this rank, places of outputs whose memory counts elsewhere.
    """
    posts, routes = posts_of(schedule, feeds)[rank], routes_of(schedule, feeds)[rank]
    coming = {peer: deque(parcels) for peer, parcels in routes.receives.items()}
    source = {each: peer for peer, parcels in routes.receives.items() for each in parcels}
    sent: dict[int, deque[Parcel]] = defaultdict(deque)
    retired: Counter[int] = Counter()
    held: Counter[tuple[Action, int]] = Counter()  # how many messages have a tensor
    now = 0

    def change(parcel: Parcel, more: int) -> None:
        nonlocal now
        metas = boundaries.crossing(parcel, feeds)
        places = feeds.positions(parcel.boundary, parcel.taker) or range(len(metas))
        for place, meta in zip(places, metas, strict=True):
            if meta is None or (parcel.forward and place in lent.get(parcel.boundary, ())):
                continue
            before = held[parcel.result, place]
            held[parcel.result, place] += more
            now += _size(meta) * ((before + more > 0) - (before > 0))

    def post(peer: int, until: Parcel | None = None) -> None:
        while coming[peer] and (until is None or until in coming[peer]):
            change(coming[peer].popleft(), 1)
            if until is None:
                return

    found = []
    for action in schedule.ranks[rank]:
        if not action.kind.is_compute:
            found.append(now)
            continue
        for peer in posts.get(action, ()):
            post(peer)
        for parcel in parcels_for(action, feeds):
            if parcel in source:
                peer = source[parcel]
                post(peer, parcel)
                tells = any(boundaries.crossing(parcel, feeds))  # else nothing travels
                while tells and retired[peer] < routes.proven[parcel]:
                    change(sent[peer].popleft(), -1)
                    retired[peer] += 1
            change(parcel, -1)  # it is the stage's now
        found.append(now)
        if action.kind is ActionKind.FORWARD and action.stage == schedule.stages - 1:
            now += sum(map(_size, boundaries.known[action.stage]))  # losses stay until the end
        for parcel in parcels_of(result_of(action), feeds):
            change(parcel, 1)
            if (target := schedule.placement[parcel.stage]) != rank:
                sent[target].append(parcel)
    return found


def _size(meta: TensorMeta) -> int:
    return meta.shape.numel() * meta.dtype.itemsize
