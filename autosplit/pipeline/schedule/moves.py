"""Activations that are away for a while: which moves of a schedule belong together.

``EVICT`` stands where a rank begins to send what it holds of a microbatch to its partner, and
``ACCEPT`` in the partner's row where that takes it in; ``RETURN`` where the partner begins to send
it back, and ``LOAD`` where the owner takes that in. ``OFFLOAD`` and ``RELOAD`` are the same with
the rank's own store on the host. A microbatch may be away twice: while it is saved, from F to the
backward, and while it is deferred, from I to W.

None of these keeps its rank from going on. What must wait, and for what:

- I, B or W of a microbatch that is away, until it is all there again;
- a rank that is to hold more (F and RECOMPUTE by computing, ACCEPT, LOAD and RELOAD by their
  buffers), until all has left that its row sends away before the compute action before. A transfer
  so has at least one compute action to hide behind, and what a rank holds is bounded by the order
  of its row alone;
- the rank itself at an ``AWAIT``, until what its row sent away of that microbatch has left, be it
  its own or its partner's: where there is no room for what comes next beside it, at the price of a
  transfer that hides behind nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .action import ARRIVALS, DEPARTURES, Action, ActionKind
from .schedule import Schedule

TAKERS = frozenset(
    {
        ActionKind.FORWARD,
        ActionKind.RECOMPUTE,
        ActionKind.ACCEPT,
        ActionKind.LOAD,
        ActionKind.RELOAD,
    }
)
"""After which a rank holds more, and which therefore wait for what was sent away."""

_USES = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class Journey:
    """One time that what a microbatch holds on a stage is away from its rank.

    Attributes:
        stage: whose it is.
        microbatch: of which microbatch.
        rank: the rank that runs the stage.
        leaves: the place in that rank's row of EVICT or OFFLOAD.
        comes: that of LOAD or RELOAD.
        used: that of the I, B or W behind it, which needs it.
        deferred: whether it is between I and W, rather than between F and the backward.
        partner: the rank that has it meanwhile; None for the host's store.
        accepted: the place in the partner's row of ACCEPT.
        returned: that of RETURN.
    """

    stage: int
    microbatch: int
    rank: int
    leaves: int
    comes: int
    used: int
    deferred: bool
    partner: int | None = None
    accepted: int = -1
    returned: int = -1


def has_moves(schedule: Schedule) -> bool:
    """Whether anything of the step is away for a while."""
    return any(action.kind in DEPARTURES for row in schedule.ranks for action in row)


def journeys_of(schedule: Schedule) -> tuple[Journey, ...]:
    """All journeys, in the order of their departures, rank by rank.

    Of moves with the same text the first in a row belong together, then the second. What does not
    make a whole journey, as in an illegal schedule, is left out.
    """
    if not has_moves(schedule):
        return ()
    moving = {
        (a.stage, a.microbatch) for row in schedule.ranks for a in row if a.kind in DEPARTURES
    }
    places = [_places(row, moving) for row in schedule.ranks]
    found = [
        journey
        for rank in range(len(schedule.ranks))
        for journey in _from_rank(schedule, places, rank)
    ]
    return tuple(sorted(found, key=lambda each: (each.rank, each.leaves)))


def _places(row: Sequence[Action], moving: set[tuple[int, int]]) -> dict[Action, list[int]]:
    """Where each action on what moves stands."""
    places: dict[Action, list[int]] = defaultdict(list)
    for place, action in enumerate(row):
        if (action.stage, action.microbatch) in moving:
            places[action].append(place)
    return dict(places)


def _from_rank(
    schedule: Schedule, places: Sequence[dict[Action, list[int]]], rank: int
) -> Iterator[Journey]:
    for action, leaves in places[rank].items():
        if action.kind is ActionKind.OFFLOAD:
            comes = places[rank].get(_of(action, ActionKind.RELOAD), [])
            ends: list[tuple[int | None, int, int]] = [(None, -1, -1)] * len(leaves)
        elif action.kind is ActionKind.EVICT and schedule.partners is not None:
            comes = places[rank].get(_of(action, ActionKind.LOAD), [])
            partner = schedule.partners[rank]
            accepted = places[partner].get(_of(action, ActionKind.ACCEPT), [])
            returned = places[partner].get(_of(action, ActionKind.RETURN), [])
            ends = [(partner, *each) for each in zip(accepted, returned, strict=False)]
        else:
            continue
        for start, end, (partner_rank, taken, given) in zip(leaves, comes, ends, strict=False):
            used = _use(places[rank], action, end)
            if used is None:
                continue
            inputs = places[rank].get(_of(action, ActionKind.BACKWARD_INPUT), [])
            yield Journey(
                action.stage,
                action.microbatch,
                rank,
                start,
                end,
                used,
                bool(inputs) and inputs[0] < start,
                partner_rank,
                taken,
                given,
            )


def _use(places: dict[Action, list[int]], action: Action, behind: int) -> int | None:
    """The first place behind one at which the microbatch is used on its stage."""
    uses = (place for kind in _USES for place in places.get(_of(action, kind), ()))
    return min((place for place in uses if place > behind), default=None)


def _of(action: Action, kind: ActionKind) -> Action:
    return Action(action.stage, kind, action.microbatch)


def waited_departures(row: Sequence[Action]) -> Iterator[tuple[int, list[int]]]:
    """Of every action of a row that is to hold more, its place, and those of what has to have left;
    and of every AWAIT, with that of what it waits for.

    What an F, a RECOMPUTE or an AWAIT has waited for is not told again.
    """
    fresh: list[int] = []
    passed: list[int] = []
    for place, action in enumerate(row):
        if action.kind is ActionKind.AWAIT:
            awaited = [each for each in (*passed, *fresh) if awaits(action, row[each])]
            passed = [each for each in passed if each not in awaited]
            fresh = [each for each in fresh if each not in awaited]
            if awaited:
                yield place, awaited
            continue
        if action.kind in ARRIVALS:
            awaited = [*passed, *(each for each in fresh if row[each].kind is ActionKind.OFFLOAD)]
            if awaited:
                yield place, awaited
        elif action.kind in TAKERS and passed:
            yield place, [*passed]
            passed.clear()
        if action.kind.is_compute:
            passed += fresh
            fresh.clear()
        elif action.kind in DEPARTURES:
            fresh.append(place)


def awaits(action: Action, departure: Action) -> bool:
    """Whether an AWAIT is for a departure before it in its row."""
    same = (action.stage, action.microbatch) == (departure.stage, departure.microbatch)
    return same and departure.kind in DEPARTURES


def recomputed(row: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Stage and microbatch of every RECOMPUTE of a row."""
    return frozenset(
        (action.stage, action.microbatch) for action in row if action.kind is ActionKind.RECOMPUTE
    )
