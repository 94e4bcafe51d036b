"""Activation balancing: the rank that holds much sends some of it to its partner, which holds
little, and has it back in time.

Source: BPipe (Kim et al., ICML 2023). Rank r of P has rank P-1-r as its partner. What is evicted is
what is used last of all that the rank holds, which in 1F1B is its latest microbatch: no other
choice takes fewer transfers. The paper's bound is ceil((N+2)/2) microbatches, of 1F1B's N+1 on both
together and one that is on its way. Where bytes are known, only as many travel of each microbatch
as the bound asks for, and it may be lower: what is on its way then is only a tensor each way.

Exchanges at one place of a row: what a rank made goes to its partner, what it needs comes back.

Where both ends wait until what leaves has left, what is on its way counts on neither beside what
they compute, so that a pair can come down to half of what both hold. That takes a place at which
neither holds much else: the owner just before it needs what is away, or before it makes more; and
the partner between a backward and the forward behind it, wherever that falls by the times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import (
    ROUNDING,
    StageMemory,
    moved_bytes,
    peak_memory,
)
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.timeline import Timeline
from autosplit.runtime.fitting import fitting

from .measures import bounds_of, refuse_excess, those_that_run
from .trips import WAYS, Held, Occupancy, Trip, choose_trips, in_whole, to_partner


@dataclass(frozen=True)
class SwapRule:
    """Where everything that is away leaves and comes back.

    Attributes:
        out_before_forwards: it leaves as its rank comes to its next F, not as soon as it is made.
        back_before_forwards: it comes back before the Fs that run just before its use.
        lead: so many compute actions before that.
        slack: of the shortest action, how late the partner may be.
    """

    out_before_forwards: bool
    back_before_forwards: bool
    lead: int
    slack: float


RULES = tuple(
    SwapRule(*each) for each in product((False, True), (False, True), (0, 1), (0.0, 0.5, 1.0))
)


def swaps(
    there: Occupancy, bound: float, memory: Sequence[StageMemory], rule: SwapRule
) -> Iterator[tuple[dict[int, int], list[Trip]]]:
    """How much of each stage's microbatches travels under a rule, and when: the least that brings a
    rank below a bound, and then one tensor more.
    """
    trips = [trip for each in there.held if (trip := _trip(there, each, rule)) is not None]
    largest: dict[int, float] = {}
    for trip in trips:
        largest[trip.what.stage] = max(largest.get(trip.what.stage, 0.0), trip.what.size)
    share = _share(there, bound, trips)
    for _ in range(2):
        if not 0.0 < share <= 1.0:
            return
        moved = {stage: _enough(memory[stage], size, share) for stage, size in largest.items()}
        yield moved, _needed(there, bound, trips, memory, moved)
        more = ((most + 1) / largest[stage] for stage, most in moved.items() if largest[stage])
        share = min(more, default=2.0)


def _trip(there: Occupancy, what: Held, rule: SwapRule) -> Trip | None:
    kinds, out, back = there.kinds, what.made + 1, what.used
    if rule.out_before_forwards:
        while out < back and kinds[out] is not ActionKind.FORWARD:
            out += 1
    if rule.back_before_forwards:
        while back > out and kinds[back - 1] is ActionKind.FORWARD:
            back -= 1
    back -= rule.lead
    return Trip(what, out, back, 0.0, out) if out < back else None


def _share(there: Occupancy, bound: float, trips: Sequence[Trip]) -> float:
    """Of what each microbatch holds, how much has to be away; above 1 where that is not enough."""
    share = 0.0
    for slot, level in enumerate(there.level):
        away = sum(trip.what.size for trip in trips if trip.out <= slot < trip.back)
        over = level - bound * ROUNDING
        if over > 0.0:
            share = max(share, over / away if away else 2.0)
    return share


def _enough(size: StageMemory, largest: float, share: float) -> int:
    """The bytes of the fewest tensors that are a share of what a microbatch holds at most."""
    asked = share * largest / ROUNDING
    piece = max(size.pieces, default=largest / size.tensors)
    if not piece:
        return 0
    for count in range(1, 1 + len(size.pieces)):
        most = count * piece
        if sum(size.pieces[at] for at in fitting(size.pieces, most)) >= asked:
            return in_whole(most)
    return in_whole(min(-(-asked // piece) * piece, largest))


def _needed(
    there: Occupancy,
    bound: float,
    trips: Sequence[Trip],
    memory: Sequence[StageMemory],
    moved: Mapping[int, int],
) -> list[Trip]:
    """Those of the trips without which the rank would be above its bound."""

    def travels(trip: Trip) -> float:
        held = trip.what
        return moved_bytes(moved, held.stage, memory[held.stage], deferred=held.deferred)

    level, needed = [*there.level], []
    for trip in trips:
        for slot in range(trip.out, trip.back):
            level[slot] -= travels(trip)
    for trip in trips:
        span, size = range(trip.out, trip.back), travels(trip)
        if all(level[slot] + size <= bound * ROUNDING for slot in span):
            for slot in span:
                level[slot] += size
        else:
            needed.append(trip)
    return needed


_LEADS = (0, 1, 2, 3)
_SLOWER = 1.005  # of a step: what is so much faster is worth more transfers
_WORTH = 1.02  # times the step, for what a pair keeps whatever transfers take


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
        bound: the most a rank may hold of its microbatches at once, in time, in the unit of
            ``costs.memory``: one number, or one for each rank. None: the paper's, which for 1F1B
            is ceil((N+2)/2) microbatches; of other schedules, half of what a rank and its partner
            hold and one microbatch more.
        costs: of every stage; None: all stages take and hold the same, what is saved and deferred
            counts as 1, and whole microbatches travel.

    Raises:
        ScheduleError: the schedule evicts already, or the bound cannot be kept; says what could.
    """
    if schedule.partners is not None:
        raise ScheduleError(
            f"{schedule.name!r} evicts already: balance the schedule that it was made from"
        )
    whole = costs is None
    if costs is None:
        costs = Costs(
            [(1.0, 1.0, 1.0)] * schedule.stages, [StageMemory(1.0, 1.0)] * schedule.stages
        )
    bounds = _bounds(schedule, bound, costs)
    found = nearest(schedule, costs, bounds, whole=whole, worth=_WORTH)
    refuse_excess("balancing", found, costs, bounds)
    return found


def nearest(
    schedule: Schedule,
    costs: Costs,
    bounds: Sequence[float],
    *,
    whole: bool = False,
    worth: float = math.inf,
) -> Schedule:
    """The schedule that evicts until bounds are kept, or that comes as near to that as it can.

    Args:
        schedule: a legal one.
        costs: of every stage.
        bounds: by rank.
        whole: whether whole microbatches travel.
        worth: times the step, what may be paid for bounds that are kept whatever transfers take,
            where they are kept in time without.
    """
    timeline = costs.timeline(schedule)
    ranks = len(schedule.ranks)
    partners = tuple(range(ranks - 1, -1, -1))
    found = replace(schedule, partners=partners)
    for low in range(ranks // 2):
        pair = low, partners[low]
        found, timeline = _pair(found, timeline, pair, bounds, costs, whole=whole, worth=worth)
    evicts = any(action.kind is ActionKind.EVICT for row in found.ranks for action in row)
    return found if evicts else schedule


def _bounds(
    schedule: Schedule, bound: float | Sequence[float] | None, costs: Costs
) -> Sequence[float]:
    ranks = len(schedule.ranks)
    if bound is not None:
        return bounds_of(bound, ranks)
    peaks = peak_memory(schedule, costs.memory)
    found = []
    for rank, peak in enumerate(peaks):
        unit = max(max(m.saved, m.deferred) for m in (costs.memory[s] for s in schedule.held(rank)))
        pair = peak + peaks[ranks - 1 - rank]
        found.append(unit * math.ceil((pair / unit + 1) / 2 - 1e-9) if unit else 0.0)
    return [max(found)] * ranks


def _pair(
    schedule: Schedule,
    timeline: Timeline,
    pair: tuple[int, int],
    bounds: Sequence[float],
    costs: Costs,
    *,
    whole: bool,
    worth: float,
) -> tuple[Schedule, Timeline]:
    """The fewest bytes that keep both within their bounds, whatever transfers take if that can be
    had; or what comes nearest to it.
    """
    sides = [Occupancy(schedule, costs, timeline, rank) for rank in pair]
    excesses = [max(side.level) - bounds[side.rank] for side in sides]
    if max(excesses) <= (ROUNDING - 1) * max(map(abs, bounds)):
        return schedule, timeline
    donor, partner = sides if excesses[0] >= excesses[1] else reversed(sides)
    longest = timeline.step_time * worth
    best: tuple[_Score, Schedule, Timeline] | None = None
    if not whole:
        best = _exchanged(schedule, donor, partner, bounds, costs, longest)
    if best is not None and not best[0].long:
        return best[1:]
    for moved in _amounts(schedule, donor, bounds[donor.rank], costs, whole=whole):
        for lead, way in product(_LEADS, WAYS):
            made = _evicted(schedule, donor, partner, bounds[donor.rank], costs, moved, lead, way)
            for tried, ran in those_that_run([made], costs):
                excess = _over(costs.peaks(tried, ran), bounds, pair)
                by_order = _over(peak_memory(tried, costs.memory), bounds, pair)
                score = _Score(excess, ran.step_time > longest, by_order, ran.step_time)
                if best is None or score._replace(step=score.step * _SLOWER) < best[0]:
                    best = score, tried, ran
                if best[0] <= (0.0, False, 0.0, timeline.step_time * _SLOWER):
                    return best[1:]
    return (schedule, timeline) if best is None else best[1:]


class _Score(NamedTuple):
    """What is better is less.

    Attributes:
        excess: of the bounds, in time.
        long: whether it takes longer than it may.
        by_order: of the bounds, whatever transfers take.
        step: seconds.
    """

    excess: float
    long: bool
    by_order: float
    step: float


def _over(peaks: Sequence[float], bounds: Sequence[float], pair: tuple[int, int]) -> float:
    return max(0.0, *(peaks[rank] - bounds[rank] * ROUNDING for rank in pair))


def _exchanged(
    schedule: Schedule,
    donor: Occupancy,
    partner: Occupancy,
    bounds: Sequence[float],
    costs: Costs,
    longest: float,
) -> tuple[_Score, Schedule, Timeline] | None:
    """The shortest step in which both exchange what is beyond their bounds, and keep them so
    whatever transfers take; None if that cannot be.
    """
    pair = donor.rank, partner.rank
    shortest = min(end - start for start, end in zip(donor.starts, donor.ends, strict=True))
    tried = (
        replace(
            to_partner(schedule, donor, partner, trips, late=rule.slack * shortest),
            moved={**schedule.moved, **moved},
        )
        for rule in RULES
        for moved, trips in swaps(donor, bounds[donor.rank], costs.memory, rule)
    )
    within = (each for each in tried if not _over(peak_memory(each, costs.memory), bounds, pair))
    scored = (
        (_Score(0.0, ran.step_time > longest, 0.0, ran.step_time), each, ran)
        for each, ran in those_that_run(within, costs)
    )
    return min(scored, key=lambda each: each[0], default=None)


def _amounts(
    schedule: Schedule, donor: Occupancy, bound: float, costs: Costs, *, whole: bool
) -> Iterator[dict[int, int]]:
    """How many bytes of each microbatch the donor's stages move, the fewest first."""
    sizes = {stage: costs.memory[stage] for stage in schedule.held(donor.rank)}
    tensors = min(size.tensors for size in sizes.values())
    if whole or tensors == 1:  # which moves whole or not at all
        yield {}
        return
    peak = max(donor.level)
    largest = {stage: max(size.saved, size.deferred) for stage, size in sizes.items()}
    unit = max(largest.values())
    # Of the peak, what operators take for themselves is no microbatch that could be away.
    away = min(max(1, round(peak / unit) - 1), donor.most_held()) if unit else 0
    for count in range(away, 0, -1):
        share = (peak - bound) / (count * unit)
        for slack in (0.0, share / (tensors * count - 1), 0.5 / count):
            if 0.0 < share + slack <= 1.0:
                yield {s: in_whole((share + slack) * size) for s, size in largest.items()}
    yield {}


def _evicted(
    schedule: Schedule,
    donor: Occupancy,
    partner: Occupancy,
    bound: float,
    costs: Costs,
    moved: Mapping[int, int],
    lead: int,
    way: tuple[bool, bool],
) -> Schedule:
    """The schedule in which the donor evicts so much of each microbatch."""
    link, (smooth, strict) = costs.transfer.link(donor.rank, partner.rank), way
    trips = choose_trips(
        donor, bound, moved, link, lambda held: held.used, lead=lead, smooth=smooth, strict=strict
    )
    return replace(to_partner(schedule, donor, partner, trips), moved={**schedule.moved, **moved})
