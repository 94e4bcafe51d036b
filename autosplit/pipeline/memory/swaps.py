"""Exchanges at one place of a row: what a rank made goes to its partner, what it needs comes back.

Where both ends wait until what leaves has left, what is on its way counts on neither beside what
they compute, so that a pair can come down to half of what both hold. That takes a place at which
neither holds much else: the owner just before it needs what is away, or before it makes more; and
the partner between a backward and the forward behind it, wherever that falls by the times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.simulation.activation_memory import ROUNDING, StageMemory, moved_bytes
from autosplit.runtime.activations.fitting import fitting

from .occupancy import Held, Occupancy
from .trips import Trip, in_whole


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
