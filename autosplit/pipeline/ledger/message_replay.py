"""One rank's messages in a step, with storages instead of tensors; as ``Transport`` has them.

Storages without tensors: how many hold each, and how many bytes there are in all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from autosplit.pipeline.engine.boundaries import Negotiation
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.routes import Parcel, parcels_for, parcels_of, routes_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds


class Storage:
    """Memory of one size.

    Attributes:
        bytes: its size.
        own: whether it is counted here; what is on its way elsewhere is not.
        holders: how many hold it.
    """

    __slots__ = ("bytes", "holders", "own")

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.own = True
        self.holders = 0


class Level:
    """Bytes of all storages that are held.

    Attributes:
        now: bytes.
        highest: the most since ``begin``.
    """

    def __init__(self) -> None:
        self.now = self.highest = 0

    def begin(self) -> None:
        """Count the most from here on."""
        self.highest = self.now

    def note(self, more: int) -> None:
        """For a while there are so many bytes more."""
        self.highest = max(self.highest, self.now + more)

    def hold(self, storages: Iterable[Storage | None]) -> None:
        """Another one holds each."""
        self.swap((), storages)
        self.note(0)

    def swap(self, taken: Iterable[Storage], made: Iterable[Storage | None]) -> None:
        """Hold what was made and let go of what was taken, in one moment."""
        for storage in filter(None, made):
            if storage.own and not storage.holders:
                self.now += storage.bytes
            storage.holders += 1
        self.release(taken)

    def release(self, storages: Iterable[Storage | None]) -> None:
        """One of its holders lets go of each."""
        for storage in filter(None, storages):
            storage.holders -= 1
            if storage.own and not storage.holders:
                self.now -= storage.bytes


Values = list[Storage | None]
"""Each held once by whoever has the list; None for the batch's, or where there is no gradient."""


class MessageReplay:
    """What a rank's messages hold.

    Args:
        schedule: what is run.
        rank: whose messages.
        feeds: who feeds whom.
        negotiation: where it was agreed on what stages put out and get back.
        level: counts.
        posts: see ``Transport``.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        feeds: Feeds,
        negotiation: Negotiation,
        level: Level,
        posts: Mapping[Action, Sequence[int]],
    ) -> None:
        self._posts = posts
        self._schedule, self._rank, self._feeds = schedule, rank, feeds
        self._negotiation, self._level = negotiation, level
        self._routes = routes_of(schedule, feeds)[rank]
        self._source = {p: peer for peer, ps in self._routes.receives.items() for p in ps}
        self._place = {p: at for ps in self._routes.receives.values() for at, p in enumerate(ps)}
        self._posted: dict[int, int] = {}
        self._sent: Mapping[int, deque[Values]] = {}
        self._retired: dict[int, int] = {}
        self._coming: dict[Parcel, Values] = {}
        self._here: dict[Parcel, Values] = {}
        self._losses: list[Storage] = []

    def begin(self) -> None:
        """Start a step."""
        self._posted = dict.fromkeys(self._routes.receives, 0)
        self._sent, self._retired = defaultdict(deque), defaultdict(int)

    def post(self, action: Action) -> None:
        """Post the receives that are posted before an action."""
        for peer in self._posts.get(action, ()):
            self._post(peer, self._posted[peer] + 1)

    def finish(self) -> None:
        """End a step: everything has arrived, and its losses are with the caller."""
        for messages in self._sent.values():
            for message in messages:
                self._level.release(message)
        self._level.release(self._losses)
        self._losses.clear()

    def inputs(self, action: Action) -> Values:
        """The arguments of a forward, without targets."""
        parcels = parcels_for(action, self._feeds)
        found = [self._take(parcel) for parcel in parcels]
        if self._feeds.wiring is None:
            return found[0] if found else []
        makers = self._feeds.sources(action.stage)
        given: Values = []
        for source in self._feeds.wiring.inputs[action.stage]:
            if source.stage is None:
                given.append(None)
                continue
            positions = self._feeds.positions(source.stage, action.stage) or ()
            each = found[makers.index(source.stage)][positions.index(source.position)]
            self._level.hold([each])
            given.append(each)
        for values in found:
            self._level.release(values)
        return given

    def gradients(self, action: Action) -> Values:
        """The gradients of a stage's outputs."""
        parcels = parcels_for(action, self._feeds)
        found = [self._take(parcel) for parcel in parcels]
        if self._feeds.wiring is None or not found:  # of the last stage it is the loss's
            return found[0] if found else []
        totals: Values = [None] * self._feeds.wiring.outputs[action.stage]
        targets = self._feeds.targets(action.stage)
        for values, target in reversed(list(zip(found, targets, strict=True))):
            positions = self._feeds.positions(action.stage, target) or ()
            for position, each in zip(positions, values, strict=True):
                totals[position] = self._added(totals[position], each)
        return totals

    def deliver(self, result: Action, values: Values) -> None:
        """Hand on a result, of which the caller lets go. Losses are kept until the step ends."""
        if result.stage == self._schedule.stages - 1 and result.kind is ActionKind.FORWARD:
            self._keep_loss(result.stage, values)
        for parcel in parcels_of(result, self._feeds):
            given = self._given(parcel, values)
            target = self._schedule.placement[parcel.stage]
            if target == self._rank:
                self._here[parcel] = given
            else:
                self._sent[target].append(given)
        self._level.release(values)

    def _keep_loss(self, stage: int, values: Values) -> None:
        """A loss in memory that is not its alone is kept as a copy."""
        for value, meta in zip(values, self._negotiation.known[stage], strict=True):
            if value is not None:
                size = meta.dtype.itemsize
                kept = value if value.bytes == size else Storage(size)
                self._level.hold([kept])
                self._losses.append(kept)

    def _given(self, parcel: Parcel, values: Values) -> Values:
        """What goes into a parcel, held for it."""
        if parcel.forward:
            taken = [*self._feeds.select(values, parcel.boundary, parcel.taker)]
            self._level.hold(taken)
            return taken
        places = self._feeds.places(parcel.boundary, parcel.taker)
        given: Values = []
        for place, meta in enumerate(self._negotiation.crossing(parcel, self._feeds)):
            at = [place] if places is None else places[place]
            first, *others = (None if meta is None else values[each] for each in at)
            self._level.hold([first])
            for other in others:
                self._level.hold([other])
                first = self._added(first, other)
            given.append(first)
        return given

    def _added(self, one: Storage | None, other: Storage | None) -> Storage | None:
        """A sum in memory of its own; both are let go of."""
        if one is None or other is None:
            return other if one is None else one
        total = Storage(one.bytes)
        self._level.hold([total])
        self._level.release([one, other])
        return total

    def _take(self, parcel: Parcel) -> Values:
        if parcel not in self._source:
            return self._here.pop(parcel)
        peer = self._source[parcel]
        self._post(peer, self._place[parcel] + 1)
        values = self._coming.pop(parcel)
        if not any(values):  # nothing travels, so nothing tells what has arrived
            return values
        while self._retired[peer] < self._routes.proven[parcel]:
            self._level.release(self._sent[peer].popleft())
            self._retired[peer] += 1
        return values

    def _post(self, peer: int, count: int) -> None:
        parcels = self._routes.receives[peer]
        while self._posted[peer] < min(count, len(parcels)):
            parcel = parcels[self._posted[peer]]
            self._posted[peer] += 1
            self._coming[parcel] = coming = [
                None if meta is None else Storage(meta.shape.numel() * meta.dtype.itemsize)
                for meta in self._negotiation.crossing(parcel, self._feeds)
            ]
            self._level.hold(coming)
