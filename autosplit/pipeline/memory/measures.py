"""Measures on one rank alone: activations in the host's store while nobody needs them, and
activations made again from a stage's inputs; and the bounds that they are taken for.

Offloading is PipeOffload (Wan et al., arXiv 2503.01328). What lives longest for its bytes goes
first: each byte of it is away for the longest time for the same two transfers. The transfers go on
beside computation, and what a row sends away is waited for only by what takes its place, so that a
schedule knows from its own times what the store's bandwidth allows for nothing.

Of what is made again, the F keeps its inputs only. A RECOMPUTE stands before the backward that
needs the rest: not in it, so that it can run while the rank waits for the gradients, and what it
makes serves I and W alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from operator import itemgetter

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.timeline import Timeline

from .trips import WAYS, Held, Occupancy, choose_trips, inserted, to_host

_LEADS = (0, 1, 2, 4)
_FREE = 1.002  # of a step: what is no slower than that costs nothing
_HALVINGS = 7
_LOOK_BACK = (0, 2, 5)  # compute actions before the backward among which a wait is looked for


def bounds_of(limit: float | Sequence[float], ranks: int) -> Sequence[float]:
    """One bound for each rank.

    Raises:
        ScheduleError: not as many as there are ranks, or a bound below 0.
    """
    bounds = list(limit) if isinstance(limit, Sequence) else [limit] * ranks
    if len(bounds) != ranks or not all(bound >= 0 for bound in bounds):
        raise ScheduleError(
            f"a limit is a number >= 0, or one for each of {ranks} ranks; got {limit!r}"
        )
    return bounds


def refuse_excess(doing: str, schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> None:
    """Refuse a schedule with a rank above its bound.

    Raises:
        ScheduleError: says which rank, and what bound it could keep.
    """
    peaks = costs.peaks(schedule, costs.timeline(schedule))
    for rank, (peak, bound) in enumerate(zip(peaks, bounds, strict=True)):
        if peak > bound * ROUNDING:
            raise ScheduleError(
                f"{doing} leaves rank {rank} of {schedule.name!r} with {peak:g}, more than its "
                f"bound of {bound:g}: raise it to {peak:g}, take another measure as well "
                "(balance, offload, recompute), or cut the batch into smaller microbatches"
            )


def rank_by_rank(
    schedule: Schedule,
    costs: Costs,
    bounds: Sequence[float],
    changed: Callable[[Schedule, Occupancy, float], Iterable[Schedule]],
) -> Schedule:
    """The schedule with each rank in turn brought below its bound, or as near to it as it goes.

    Args:
        schedule: a legal one.
        costs: of every stage.
        bounds: by rank.
        changed: schedules to try for a rank that is above its bound, given what it holds. One that
            waits for itself is passed over; of the others the nearest counts, then the shortest.
    """
    timeline = costs.timeline(schedule)
    for rank, bound in enumerate(bounds):
        if math.isinf(bound):
            continue
        there = Occupancy(schedule, costs, timeline, rank)
        if max(there.level) <= bound * ROUNDING:
            continue
        scored = (
            (max(0.0, costs.peaks(tried, ran)[rank] - bound * ROUNDING), ran.step_time, tried, ran)
            for tried, ran in those_that_run(changed(schedule, there, bound), costs)
        )
        best = min(scored, key=itemgetter(0, 1), default=None)
        if best is not None:
            *_, schedule, timeline = best
    return schedule


def those_that_run(
    schedules: Iterable[Schedule], costs: Costs
) -> Iterator[tuple[Schedule, Timeline]]:
    """With its timeline, each in which ranks do not wait for each other."""
    for schedule in schedules:
        try:
            timeline = costs.timeline(schedule)
        except ScheduleError:
            continue
        yield schedule, timeline


def offload(
    schedule: Schedule, costs: Costs, limit: float | Sequence[float] | None = None
) -> Schedule:
    """The schedule in which no rank holds more than ``limit``, with what is beyond in its store.

    Args:
        schedule: a legal one.
        costs: of every stage; ``costs.transfer.host`` is the link to the store.
        limit: the most a rank may hold of its microbatches at once, in time, in the unit of
            ``costs.memory``: one number, or one for each rank. None: as little as the store's
            bandwidth allows at no cost.

    Raises:
        ScheduleError: the limit cannot be kept; says what could.
    """
    if limit is None:
        return _free(schedule, costs)
    bounds = bounds_of(limit, len(schedule.ranks))
    found = offloaded(schedule, costs, bounds)
    refuse_excess("offloading", found, costs, bounds)
    return found


def offloaded(schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> Schedule:
    """The schedule that offloads until bounds are kept, or that comes as near to that as it can."""
    return rank_by_rank(schedule, costs, bounds, partial(_with_trips, costs))


def _with_trips(
    costs: Costs, schedule: Schedule, there: Occupancy, bound: float
) -> Iterator[Schedule]:
    """With what is beyond the bound away, by several looks ahead."""
    if not there.held:
        return
    link = costs.transfer.host or Link()

    def life(held: Held) -> float:
        return there.starts[held.used] - there.ends[held.made]

    for lead, (smooth, strict) in product(_LEADS, WAYS):
        trips = choose_trips(
            there, bound, schedule.moved, link, life, lead=lead, smooth=smooth, strict=strict
        )
        yield to_host(schedule, there, trips)


def _free(schedule: Schedule, costs: Costs) -> Schedule:
    """The least bounds, all by one share of what ranks hold, at which the step is as long."""
    plain = costs.timeline(schedule)
    peaks = costs.peaks(schedule, plain)
    found, low, high = schedule, 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        tried = offloaded(schedule, costs, [share * peak for peak in peaks])
        if costs.timeline(tried).step_time <= plain.step_time * _FREE:
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
    bounds = bounds_of(limit, len(schedule.ranks))
    found = recomputed(schedule, costs, bounds)
    refuse_excess("recomputing", found, costs, bounds)
    return found


def recomputed(schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> Schedule:
    """The schedule that recomputes until bounds are kept, or that comes as near as it can."""
    return rank_by_rank(schedule, costs, bounds, partial(_made_again, costs))


def _made_again(
    costs: Costs, schedule: Schedule, there: Occupancy, bound: float
) -> Iterator[Schedule]:
    """With what is beyond the bound made again, in waits that are looked for near and far."""
    for look_back in _LOOK_BACK:
        chosen = [
            (slot, Action(held.stage, ActionKind.RECOMPUTE, held.microbatch))
            for slot, held in _choose(there, bound, costs, look_back)
        ]
        yield inserted(schedule, {there.rank: (there, chosen)})


def _choose(there: Occupancy, bound: float, costs: Costs, look_back: int) -> list[tuple[int, Held]]:
    """What is made again, each with the slot before which that is done."""
    level = [*there.level]
    waits = [there.waits(slot) for slot in range(len(level))]
    left = {
        held: True
        for held in there.held
        if not held.deferred
        and there.kinds[held.made] is ActionKind.FORWARD
        and held.size > costs.memory[held.stage].inputs
    }
    chosen: list[tuple[int, Held]] = []
    for slot in range(len(level)):
        while level[slot] > bound * ROUNDING:
            able = [held for held in left if held.made < slot < held.used]
            if not able:
                break
            places = {held: _place(held, slot, waits, look_back) for held in able}
            prices = {
                held: (max(0.0, costs.times[held.stage][0] - waits[at]), -held.used)
                for held, at in places.items()
            }
            held = min(able, key=prices.__getitem__)
            at = places[held]
            del left[held]
            chosen.append((at, held))
            waits[at] = max(0.0, waits[at] - costs.times[held.stage][0])
            for each in range(held.made + 1, at):
                level[each] -= held.size - costs.memory[held.stage].inputs
    return chosen


def _place(held: Held, slot: int, waits: Sequence[float], look_back: int) -> int:
    """Before which slot it is made again: the longest wait near its use, the last of like ones."""
    first = max(slot + 1, held.used - look_back)
    return max(range(first, held.used + 1), key=lambda at: (waits[at], at))
