"""What holds a rank below a bound of memory: activations kept at its partner, or in the host's
store, while nobody needs them; or made again from a stage's inputs.

Balancing is BPipe (Kim et al., ICML 2023). Rank r of P has rank P-1-r as its partner, which takes
in whole microbatches. What is evicted is what is used last of all that the rank holds, which in
1F1B is its latest microbatch. The paper's bound is ceil((N+2)/2) microbatches, of 1F1B's N+1 on
both together and one that is on its way.

Offloading is PipeOffload (Wan et al., arXiv 2503.01328): what lives longest is away, for the same
two transfers as anything else.

Of what is made again, the F keeps its inputs only. A RECOMPUTE stands before the backward that
needs the rest: not in it, so that it can run while the rank waits for the gradients, and what it
makes serves I and W alike.

Bounds are kept by the order of rows (``peak_memory``), whatever transfers take. A few rules say
where all that is away leaves and comes back; of what they make, the shortest step counts. Where a
rank waits until what leaves has left, that does not count beside what it computes: at the price of
transfers that hide behind nothing.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from operator import attrgetter, itemgetter
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.moves import TAKERS, journeys_of
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import (
    ROUNDING,
    StageMemory,
    levels_of,
    peak_memory,
)
from autosplit.pipeline.simulation.simulate import Costs, Timeline

_ROUNDING = 1e-9
_FREE = 1.002  # of a step: what is no slower than that costs nothing
_HALVINGS = 7


class Rule(NamedTuple):
    """Where everything that is away leaves and comes back.

    Attributes:
        lead: so many compute actions before its use.
        waits: whether ranks wait until it has left.
        slack: of the shortest action, how late a partner may be.
    """

    lead: int
    waits: bool = False
    slack: float = 0.0


_EXCHANGES = [Rule(lead, True, slack) for lead, slack in product((0, 1), (0.0, 0.5, 1.0))]
_COPIES = [Rule(*each) for each in product((0, 1, 2), (False, True))]


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
        places: per slot, its place in the row.
        kinds: per slot, what it runs.
        starts: per slot, when it starts.
        reached: per slot, when the rank comes to it, and to the moves that stand before it; it may
            wait then.
        level: per slot, what the rank holds while it runs, and at the moves before it.
        held: what can be moved or made again, in the order of its use.
    """

    def __init__(self, schedule: Schedule, costs: Costs, timeline: Timeline, rank: int) -> None:
        self.rank = rank
        row = schedule.ranks[rank]
        self.places = [place for place, action in enumerate(row) if action.kind.is_compute]
        self.kinds = [row[place].kind for place in self.places]
        spans = {span.action: span for span in timeline.spans if span.rank == rank}
        own = [spans[row[place]] for place in self.places]
        self.starts = [span.start for span in own]
        self.reached = [0.0, *(span.end for span in own[:-1])]
        levels = list(levels_of(schedule, costs.memory)[rank])
        behind = [0, *(place + 1 for place in self.places)]
        self.level = [max(levels[a:b]) for a, b in pairwise(behind)]
        self.held = self._held(schedule, costs.memory)

    def _held(self, schedule: Schedule, memory: Sequence[StageMemory]) -> list[Held]:
        row = schedule.ranks[self.rank]
        away = {
            (each.stage, each.microbatch, each.deferred)
            for each in journeys_of(schedule)
            if each.rank == self.rank
        }
        made: dict[tuple[int, int], int] = {}
        found: list[Held] = []
        for slot, place in enumerate(self.places):
            action = row[place]
            key, size = (action.stage, action.microbatch), memory[action.stage]
            deferred = action.kind is ActionKind.BACKWARD_WEIGHT
            if action.kind not in TAKERS and (*key, deferred) not in away:
                kept = size.deferred if deferred else size.saved
                found.append(Held(*key, deferred, made[key], slot, kept))
            made[key] = slot
        return found

    def wait(self, slot: int) -> float:
        """For how long the rank waits before a slot."""
        return self.starts[slot] - self.reached[slot]

    def slot_at(self, moment: float) -> int:
        """The last slot that is reached by then."""
        return max(bisect_right(self.reached, moment + _ROUNDING) - 1, 0)


@dataclass(frozen=True, slots=True)
class Trip:
    """What is away, and when.

    Attributes:
        what: is away.
        out: the slot that the departure stands before.
        gone: the slot before which it has left by the order of the row alone, as what takes its
            place waits for it.
        back: the slot that the arrival stands before.
        awaited: whether the rank waits until it has left.
    """

    what: Held
    out: int
    gone: int
    back: int
    awaited: bool = False

    @property
    def away(self) -> range:
        """The slots beside which it does not count."""
        return range(self.out if self.awaited else self.gone, self.back)


def _trips(there: Occupancy, rule: Rule, beside: int) -> list[Trip]:
    """What a rule makes of all that a rank holds.

    Args:
        there: the rank.
        rule: where it leaves and comes back.
        beside: how many compute actions a departure goes on beside until an arrival waits for it.
    """
    ways = [(held, held.made + 1, held.used - rule.lead) for held in there.held]
    arrivals = {back for _, _, back in ways}
    found = []
    for held, out, back in ways:
        gone = (
            slot
            for slot in range(out, back)
            if (slot > out and there.kinds[slot] in TAKERS)
            or (slot >= out + beside and slot in arrivals)
        )
        trip = Trip(held, out, next(gone, back), back, rule.waits)
        found += [trip] if trip.away else []
    return found


def _needed(
    level: Sequence[float], bound: float, trips: Sequence[Trip], size: Callable[[Held], float]
) -> list[Trip]:
    """Those of the trips, and of their waits, without which a rank would be above its bound."""
    left, needed = [*level], []
    for trip in trips:
        for slot in trip.away:
            left[slot] -= size(trip.what)
    for trip in trips:
        more = size(trip.what)
        ways: list[tuple[range, Trip | None]] = [(trip.away, None)]
        if trip.awaited:
            ways.append((range(trip.out, trip.gone), replace(trip, awaited=False)))
        for span, way in ways:
            if all(left[slot] + more <= bound * ROUNDING for slot in span):
                for slot in span:
                    left[slot] += more
                needed += [way] if way else []
                break
        else:
            needed.append(trip)
    return needed


Measure = Callable[[Schedule, Costs, Sequence[float]], Schedule]
"""Brings the ranks of a schedule below their bounds, or as near to that as it can."""

_New = Sequence[tuple[Occupancy, Sequence[tuple[int, Action]]]]
"""Per rank further actions of its row, each with the slot that it stands directly before."""


def _inserted(schedule: Schedule, new: _New) -> Schedule:
    """The schedule with further actions."""
    rows = list(schedule.ranks)
    for there, actions in new:
        before: dict[int, list[Action]] = defaultdict(list)
        for slot, action in actions:
            before[there.places[slot]].append(action)
        row = (a for place, own in enumerate(rows[there.rank]) for a in (*before[place], own))
        rows[there.rank] = tuple(row)
    return replace(schedule, ranks=tuple(rows))


def _move(trip: Trip, kind: ActionKind) -> Action:
    return Action(trip.what.stage, kind, trip.what.microbatch)


def _bounded(
    schedule: Schedule,
    costs: Costs,
    bounds: Sequence[float],
    groups: Iterable[Sequence[int]],
    changed: Callable[[Schedule, Sequence[Occupancy]], Iterator[Schedule]],
) -> Schedule:
    """The schedule with some ranks after others brought below their bounds, or as near as it goes.

    Args:
        schedule: a legal one.
        costs: of every stage.
        bounds: by rank.
        groups: of ranks, those that are changed together.
        changed: schedules to try for a group of which one is above its bound. One in which ranks
            wait for each other is passed over; of the others the nearest counts, then the shortest.
    """
    timeline = costs.timeline(schedule)

    def scored(tried: Schedule) -> Iterator[tuple[float, float, Schedule, Timeline]]:
        with contextlib.suppress(ScheduleError):
            ran = costs.timeline(tried)
            peaks = peak_memory(tried, costs.memory)
            excess = max(0.0, *(peaks[rank] - bounds[rank] * ROUNDING for rank in ranks))
            yield excess, ran.step_time, tried, ran

    for ranks in groups:
        sides = [Occupancy(schedule, costs, timeline, rank) for rank in ranks]
        if any(max(side.level) > bounds[side.rank] * ROUNDING for side in sides):
            every = (each for tried in changed(schedule, sides) for each in scored(tried))
            best = min(every, key=itemgetter(0, 1), default=None)
            if best is not None:
                *_, schedule, timeline = best
    return schedule


# --- balance --------------------------------------------------------------------------------------


def balance(
    schedule: Schedule,
    bound: float | Sequence[float] | None = None,
    *,
    costs: Costs | None = None,
) -> Schedule:
    """The schedule in which no rank holds more than ``bound``, with what is beyond at its partner.

    Ranks that keep the bound anyway are left as they are.

    Args:
        schedule: a legal one that evicts nothing yet.
        bound: the most a rank may hold of its microbatches at once, whatever transfers take, in the
            unit of ``costs.memory``: one number, or one for each rank. None: the paper's, which for
            1F1B is ceil((N+2)/2) microbatches; of other schedules, half of what a rank and its
            partner hold and one microbatch more.
        costs: of every stage; None: all stages take and hold the same, and what is saved and
            deferred counts as 1.

    Raises:
        ScheduleError: the schedule evicts already, or the bound cannot be kept; says what could.
    """
    if any(action.kind is ActionKind.EVICT for row in schedule.ranks for action in row):
        raise ScheduleError(
            f"{schedule.name!r} evicts already: balance the schedule that it was made from"
        )
    if costs is None:
        count = schedule.stages
        costs = Costs([(1.0, 1.0, 1.0)] * count, [StageMemory(1.0, 1.0)] * count)
    bounds = _papers(schedule, costs) if bound is None else bound
    return _kept("balancing", balanced, schedule, costs, bounds)


def balanced(schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> Schedule:
    """The schedule that evicts until bounds are kept, or that comes as near to that as it can."""
    pairs = [(low, schedule.partner(low)) for low in range(len(schedule.ranks) // 2)]

    def changed(schedule: Schedule, sides: Sequence[Occupancy]) -> Iterator[Schedule]:
        partner, donor = sorted(sides, key=lambda side: max(side.level) - bounds[side.rank])
        took = (b - a for a, b in zip(donor.starts, donor.reached[1:], strict=False))
        shortest = min(took, default=0.0)
        for rule in _EXCHANGES:
            every, bound = _trips(donor, rule, 1), bounds[donor.rank]
            trips = _needed(donor.level, bound, every, attrgetter("size"))
            yield _inserted(schedule, _ends(donor, partner, trips, rule.slack * shortest))

    return _bounded(schedule, costs, bounds, pairs, changed)


def _papers(schedule: Schedule, costs: Costs) -> list[float]:
    """The paper's bound."""
    peaks = peak_memory(schedule, costs.memory)
    unit = max(max(size.saved, size.deferred) for size in costs.memory) or 1.0
    pair = max(map(sum, zip(peaks, reversed(peaks), strict=True)))
    return [unit * math.ceil((pair / unit + 1) / 2 - 1e-9)] * len(peaks)


def _ends(donor: Occupancy, partner: Occupancy, trips: Sequence[Trip], late: float) -> _New:
    """The moves of both ranks: the partner's stand where, by the times so far, it comes to them no
    later than the rank and ``late`` seconds, all in one order on both. Where the partner is to take
    more behind that, it waits until what it gives back has left.
    """
    events = [(donor.starts[trip.out], False, trip) for trip in trips]
    events += [(donor.starts[trip.back], True, trip) for trip in trips]
    events.sort(key=itemgetter(0, 1))
    own: list[tuple[int, Action]] = []
    others: list[tuple[int, Action]] = []
    latest = 0
    for moment, back, trip in events:
        latest = max(latest, partner.slot_at(moment + late))
        others.append((latest, _move(trip, ActionKind.RETURN if back else ActionKind.ACCEPT)))
        if back:
            own.append((trip.back, _move(trip, ActionKind.LOAD)))
            if not TAKERS.isdisjoint(partner.kinds[latest:]):
                others.append((latest, _move(trip, ActionKind.AWAIT)))
        else:
            own.append((trip.out, _move(trip, ActionKind.EVICT)))
            own += [(trip.out, _move(trip, ActionKind.AWAIT))] if trip.awaited else []
    return [(donor, own), (partner, others)]


# --- offload, recompute ---------------------------------------------------------------------------


def offload(
    schedule: Schedule, costs: Costs, limit: float | Sequence[float] | None = None
) -> Schedule:
    """The schedule in which no rank holds more than ``limit``, with what is beyond in its store.

    Args:
        schedule: a legal one.
        costs: of every stage; ``costs.transfer.host`` is the link to the store.
        limit: the most a rank may hold of its microbatches at once, whatever transfers take, in the
            unit of ``costs.memory``: one number, or one for each rank. None: as little as the
            store's bandwidth allows at no cost.

    Raises:
        ScheduleError: the limit cannot be kept; says what could.
    """
    if limit is None:
        return _free(schedule, costs)
    return _kept("offloading", offloaded, schedule, costs, limit)


def offloaded(schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> Schedule:
    """The schedule that offloads until bounds are kept, or that comes as near to that as it can."""

    def changed(schedule: Schedule, sides: Sequence[Occupancy]) -> Iterator[Schedule]:
        (there,) = sides
        for rule, order, less in product(_COPIES, (1, -1), (1.0, 0.75)):
            # What is used last is away, or first; more of it may leave each more time.
            every, bound = _trips(there, rule, 0)[::order], less * bounds[there.rank]
            trips = _needed(there.level, bound, every, attrgetter("size"))
            moves = [(trip.out, 0, _move(trip, ActionKind.OFFLOAD)) for trip in trips]
            moves += [(t.out, 1, _move(t, ActionKind.AWAIT)) for t in trips if t.awaited]
            moves += [(trip.back, 2, _move(trip, ActionKind.RELOAD)) for trip in trips]
            ordered = [(slot, move) for slot, _, move in sorted(moves, key=itemgetter(0, 1))]
            yield _inserted(schedule, [(there, ordered)])

    return _bounded(schedule, costs, bounds, _each(schedule), changed)


def _free(schedule: Schedule, costs: Costs) -> Schedule:
    """The least bounds, all by one share of what ranks hold, at which the step is as long."""
    longest = _FREE * costs.timeline(schedule).step_time
    peaks = peak_memory(schedule, costs.memory)
    found, low, high = schedule, 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        tried = offloaded(schedule, costs, [share * peak for peak in peaks])
        if costs.timeline(tried).step_time <= longest:
            found, high = tried, share
        else:
            low = share
    return found


def recompute(schedule: Schedule, costs: Costs, limit: float | Sequence[float]) -> Schedule:
    """The schedule in which no rank holds more than ``limit``, with what is beyond made again.

    Args:
        schedule: a legal one.
        costs: of every stage, the inputs that its F keeps with them.
        limit: the most a rank may hold of its microbatches at once, in the unit of
            ``costs.memory``: one number, or one for each rank.

    Raises:
        ScheduleError: the limit cannot be kept; says what could.
    """
    return _kept("recomputing", recomputed, schedule, costs, limit)


def recomputed(schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> Schedule:
    """The schedule that recomputes until bounds are kept, or that comes as near as it can."""

    def freed(held: Held) -> float:
        return held.size - costs.memory[held.stage].dropped

    def changed(schedule: Schedule, sides: Sequence[Occupancy]) -> Iterator[Schedule]:
        (there,) = sides
        able = (
            Trip(held, held.made + 1, held.made + 1, held.used)
            for held in there.held
            if there.kinds[held.made] is ActionKind.FORWARD and freed(held) > 0.0
        )
        # What would run in a wait is dropped last.
        trips = sorted(filter(lambda trip: trip.away, able), key=lambda t: there.wait(t.back))
        needed = _needed(there.level, bounds[there.rank], trips, freed)
        again = [(trip.back, _move(trip, ActionKind.RECOMPUTE)) for trip in needed]
        yield _inserted(schedule, [(there, again)])

    return _bounded(schedule, costs, bounds, _each(schedule), changed)


def _each(schedule: Schedule) -> list[tuple[int]]:
    return [(rank,) for rank in range(len(schedule.ranks))]


def caps_of(cap: float | Sequence[float], ranks: int) -> tuple[float, ...]:
    """One cap for each rank.

    Raises:
        ScheduleError: not as many as there are ranks, or one below 0.
    """
    caps = tuple(cap) if isinstance(cap, Sequence) else (cap,) * ranks
    if len(caps) != ranks or not all(each >= 0 for each in caps):
        raise ScheduleError(
            f"a limit is a number >= 0, or one for each of {ranks} ranks; got {cap!r}"
        )
    return caps


def _kept(
    doing: str, take: Measure, schedule: Schedule, costs: Costs, limit: float | Sequence[float]
) -> Schedule:
    """What a measure makes of a schedule.

    Raises:
        ScheduleError: it leaves a rank above the limit; says which, and what it could keep.
    """
    bounds = caps_of(limit, len(schedule.ranks))
    least: Sequence[float] = bounds
    found = take(schedule, costs, bounds)
    first = peaks = peak_memory(found, costs.memory)
    while any(peak > bound * ROUNDING for peak, bound in zip(peaks, least, strict=True)):
        # With another bound, another schedule may hold more.
        least = [*map(max, least, peaks)]
        if not isinstance(limit, Sequence):
            least = [max(least)] * len(least)
        peaks = peak_memory(take(schedule, costs, least), costs.memory)
    for rank, (peak, bound) in enumerate(zip(first, bounds, strict=True)):
        if peak > bound * ROUNDING:
            each = [float(f"{bound:.12g}") for bound in least]
            told = each if isinstance(limit, Sequence) else each[0]
            raise ScheduleError(
                f"{doing} leaves rank {rank} of {schedule.name!r} with {peak:g}, more than its "
                f"bound of {bound:g}: raise it to {told}, take another measure as well "
                "(balance, offload, recompute), or cut the batch into smaller microbatches"
            )
    return found
