"""What a rank holds while it runs each action of its row, and of which microbatches; which of that
goes away, when, and when it comes back.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import TAKERS, journeys_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import levels_of
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.timeline import Timeline

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Held:
    """What one microbatch holds on a stage, from one compute action of its rank to another.

    Attributes:
        stage: whose it is.
        microbatch: of which microbatch.
        deferred: whether it is between I and W.
        made: the slot of the F, RECOMPUTE or I that makes it.
        used: that of the I, B or W that uses it.
        size: how much it is.
    """

    stage: int
    microbatch: int
    deferred: bool
    made: int
    used: int
    size: float


class Occupancy:
    """One rank's compute actions, called slots, in time and memory.

    Args:
        schedule: a legal one.
        costs: of every stage.
        timeline: the schedule's, with these costs.
        rank: whose.

    Attributes:
        memory: by stage.
        places: per slot, its place in the row.
        kinds: per slot, what it runs.
        starts: per slot, when it starts.
        ends: per slot, when it ends.
        reached: per slot, when the rank comes to it, and to the moves that stand before it; it may
            wait then.
        level: per slot, what the rank holds while it runs.
        held: what can be moved or made again, in the order of the row.
    """

    def __init__(self, schedule: Schedule, costs: Costs, timeline: Timeline, rank: int) -> None:
        self.rank = rank
        self.memory = costs.memory
        row = schedule.ranks[rank]
        self.places = [place for place, action in enumerate(row) if action.kind.is_compute]
        self.kinds = [row[place].kind for place in self.places]
        spans = sorted(
            (s for s in timeline.spans if s.rank == rank and s.action.kind.is_compute),
            key=lambda span: (span.start, span.end),
        )
        times = {span.action: (span.start, span.end) for span in spans}
        self.starts = [times[row[place]][0] for place in self.places]
        self.ends = [times[row[place]][1] for place in self.places]
        self.reached = [0.0, *self.ends[:-1]]
        by_place = list(levels_of(schedule, costs.memory)[rank])
        self.level: list[float] = []
        done = -1
        for place in self.places:
            self.level.append(max(by_place[done + 1 : place + 1]))
            done = place
        self.held = self._held(schedule)

    def _held(self, schedule: Schedule) -> list[Held]:
        away = {
            (each.stage, each.microbatch, each.deferred)
            for each in journeys_of(schedule)
            if each.rank == self.rank
        }
        row = schedule.ranks[self.rank]
        made: dict[tuple[int, int], int] = {}
        found: list[Held] = []
        for slot, place in enumerate(self.places):
            action = row[place]
            key = action.stage, action.microbatch
            size = self.memory[action.stage]
            deferred = action.kind is ActionKind.BACKWARD_WEIGHT
            makes = action.kind in (ActionKind.FORWARD, ActionKind.RECOMPUTE)
            if not makes and (*key, deferred) not in away:
                kept = size.deferred if deferred else size.saved
                found.append(Held(*key, deferred, made[key], slot, kept))
            made[key] = slot
        return found

    def most_held(self) -> int:
        """How many there are at once, at most, of what is held."""
        slots = range(len(self.kinds))
        return max((sum(h.made <= at <= h.used for h in self.held) for at in slots), default=0)

    def slot_at(self, moment: float) -> int:
        """The last slot that is reached by then."""
        return max(bisect_right(self.reached, moment + _ROUNDING) - 1, 0)

    def before(self, slot: int, seconds: float, most: int) -> int:
        """The last slot up to ``most`` that is reached so long before ``slot`` starts."""
        if slot >= len(self.starts):
            return most
        moment = self.starts[slot] - seconds
        return min(bisect_right(self.reached, moment + _ROUNDING) - 1, most)

    def waits(self, slot: int) -> float:
        """For how long the rank waits before a slot."""
        return self.starts[slot] - (self.ends[slot - 1] if slot else 0.0)

    def takes(self, slot: int) -> bool:
        """Whether a slot, if there is such, waits for what was sent away."""
        return slot < len(self.kinds) and self.kinds[slot] in TAKERS


@dataclass(frozen=True, slots=True)
class Trip:
    """A journey that is to be: it leaves before one slot of its rank and comes back before another.

    Attributes:
        what: is away.
        out: the slot that the departure stands before.
        back: the slot that the arrival stands before.
        took: seconds of one way.
        awaited: the slot before which the rank waits until it has left; None: it has by then, by
            the order of the row alone, or need not.
    """

    what: Held
    out: int
    back: int
    took: float
    awaited: int | None = None


WAYS = ((False, False), (True, False), (False, True))
"""Of choosing trips, smooth and strict: only those that wait keep a low bound by order alone."""


def choose_trips(
    there: Occupancy,
    bound: float,
    moved: Mapping[int, int],
    link: Link,
    prefer: Callable[[Held], float],
    *,
    lead: int,
    smooth: bool,
    strict: bool,
) -> list[Trip]:
    """Send away what a rank holds beyond a bound, as late as can be, and have it back in time.

    Args:
        there: the rank.
        bound: the most it may hold.
        moved: see ``Schedule.moved``.
        link: over which it goes.
        prefer: of all that could go the one with the largest number goes.
        lead: so many compute actions before it is used, at least, what was away starts back.
        smooth: count on what leaves while another arrives to make room for it, tensor by tensor.
        strict: have the rank wait wherever something would otherwise not have left in time.
    """

    def size(held: Held) -> float:
        return min(held.size, moved.get(held.stage, held.size))

    begin, end = [*there.level], [*there.level]
    if smooth:
        pieces = (size(held) / there.memory[held.stage].tensors for held in there.held)
        bound -= max(pieces, default=0.0)
    most = bound * (1 + _ROUNDING) + _ROUNDING
    left = {each: True for each in there.held if size(each) > 0}
    trips: list[Trip] = []
    for slot in range(len(begin)):
        while max(begin[slot], end[slot]) > most:
            if strict and _lengthened(trips, slot, size, begin, end):
                continue
            gone_by = slot if begin[slot] > most else slot + 1
            able = [
                trip
                for each in left
                if each.made < gone_by and each.used > slot
                for took in (link.latency + size(each) / link.bandwidth,)
                for trip in (_trip(there, each, gone_by, took, lead, strict=strict),)
                if each.made < trip.out and trip.back > slot and _is_gone(there, trip, gone_by)
            ]
            if not able:
                break
            trip = max(able, key=lambda trip: prefer(trip.what))
            del left[trip.what]
            trips.append(trip)
            _send(there, trip, size(trip.what), begin, end, smooth=smooth)
    return trips


def _lengthened(
    trips: list[Trip],
    slot: int,
    size: Callable[[Held], float],
    begin: list[float],
    end: list[float],
) -> bool:
    """End behind a slot, of trips that end too early for it, the one that is needed last; whether
    any does.
    """
    early = [
        (trip.what.used, at) for at, trip in enumerate(trips) if trip.back <= slot < trip.what.used
    ]
    if early:
        _, at = max(early)
        for each in range(trips[at].back, slot + 1):
            begin[each] -= size(trips[at].what)
            end[each] -= size(trips[at].what)
        trips[at] = replace(trips[at], back=slot + 1)
    return bool(early)


def _is_gone(there: Occupancy, trip: Trip, slot: int) -> bool:
    """Whether a trip has left when a slot begins: at the latest a compute action after it began."""
    return trip.awaited == slot or trip.out < slot or _gone(there, trip) <= slot


def _gone(there: Occupancy, trip: Trip) -> int:
    """The first slot that starts after a trip has left."""
    if trip.awaited is not None:
        return trip.awaited
    left = there.reached[trip.out] + trip.took
    return max(trip.out, bisect_left(there.starts, left - _ROUNDING * left))


def _send(
    there: Occupancy,
    trip: Trip,
    size: float,
    begin: list[float],
    end: list[float],
    *,
    smooth: bool,
) -> None:
    """Take a trip off what is held when each slot begins and ends."""
    gone = min(_gone(there, trip), trip.back)
    for slot in range(gone, trip.back):
        begin[slot] -= size
        end[slot] -= size
    if smooth:
        if gone:
            end[gone - 1] -= size
        if trip.back < len(begin):
            begin[trip.back] -= size


def _trip(there: Occupancy, what: Held, slot: int, took: float, lead: int, *, strict: bool) -> Trip:
    """The shortest trip on which it is away when a slot begins."""
    out = max(there.before(slot, took, min(slot, what.used - 1)), what.made + 1)
    back = there.before(what.used, took, what.used - lead)
    if not strict:
        return Trip(what, out, back, took)
    # By order what leaves just before the slot does so beside it.
    return Trip(what, out, min(max(back, slot + 1), what.used), took, None if out < slot else slot)


def to_host(schedule: Schedule, there: Occupancy, trips: Sequence[Trip]) -> Schedule:
    """The schedule in which these trips of a rank go to its host's store."""
    new: list[tuple[int, int, Action]] = []
    for trip in trips:
        new.append((trip.out, 0, _move(trip, ActionKind.OFFLOAD)))
        new.append((trip.back, 2, _move(trip, ActionKind.RELOAD)))
        if trip.awaited is not None:
            new.append((trip.awaited, 1, _move(trip, ActionKind.AWAIT)))
    new.sort(key=lambda each: each[:2])
    moves = [(slot, action) for slot, _, action in new]
    return inserted(schedule, {there.rank: (there, moves)})


def to_partner(
    schedule: Schedule,
    there: Occupancy,
    partner: Occupancy,
    trips: Sequence[Trip],
    *,
    late: float | None = None,
) -> Schedule:
    """The schedule in which these trips of a rank go to its partner.

    The partner's end stands where, by the times so far, it is reached no later than the rank's own;
    all in one order on both.

    Args:
        schedule: whose rows.
        there: the rank.
        partner: its partner.
        trips: of what the rank holds.
        late: seconds that the partner may come later than the rank; where it is to take more behind
            that, it waits until what it gives back has left. None: it does not wait.
    """
    events: list[tuple[float, int, Trip]] = []
    for trip in trips:
        moments = there.reached if late is None else there.starts
        events.append((moments[trip.out], 0, trip))
        events.append((moments[trip.back], 1, trip))
    events.sort(key=lambda each: each[:2])
    own: list[tuple[int, Action]] = []
    others: list[tuple[int, Action]] = []
    latest, last = 0, len(partner.kinds)
    for moment, back, trip in events:
        slot = partner.slot_at(moment + (late or 0.0))
        if back:
            own.append((trip.back, _move(trip, ActionKind.LOAD)))
            if late is None:
                slot = _giving(there, partner, slot, moment, trip)
        else:
            own.append((trip.out, _move(trip, ActionKind.EVICT)))
            if trip.awaited is not None:
                own.append((trip.awaited, _move(trip, ActionKind.AWAIT)))
        latest = max(latest, slot)
        kind = ActionKind.RETURN if back else ActionKind.ACCEPT
        others.append((latest, _move(trip, kind)))
        if back and late is not None and any(map(partner.takes, range(latest, last))):
            others.append((latest, _move(trip, ActionKind.AWAIT)))
    return inserted(schedule, {there.rank: (there, own), partner.rank: (partner, others)})


def _giving(there: Occupancy, partner: Occupancy, slot: int, moment: float, trip: Trip) -> int:
    """Before which slot a partner gives back, so that what it runs behind need not wait long."""
    behind = slot + 1
    if not partner.takes(behind) or partner.starts[behind] >= moment + trip.took:
        return slot
    in_time = partner.reached[behind] + trip.took <= there.starts[trip.what.used]
    return behind if in_time else slot


def _move(trip: Trip, kind: ActionKind) -> Action:
    return Action(trip.what.stage, kind, trip.what.microbatch)


def inserted(
    schedule: Schedule, new: dict[int, tuple[Occupancy, list[tuple[int, Action]]]]
) -> Schedule:
    """The schedule with further actions in the rows of ranks, each directly before a slot."""
    rows = list(schedule.ranks)
    for rank, (there, actions) in new.items():
        row, begin = rows[rank], 0
        changed: list[Action] = []
        for slot, end in enumerate([*there.places, len(row)]):
            changed += row[begin:end]
            changed += (action for at, action in actions if at == slot)
            begin = end
        rows[rank] = tuple(changed)
    return replace(schedule, ranks=tuple(rows))


def in_whole(share: float) -> int:
    """Bytes, rounded up to whole ones."""
    return math.ceil(share - _ROUNDING)
