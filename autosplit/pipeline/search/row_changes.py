"""Changes of a schedule's rows that keep it legal: what local search within a limit steps by."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import journeys_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.step_costs import Costs

from .order_changes import (
    BACKWARDS,
    TRANSFERS,
    Change,
    Row,
    Starts,
    filled,
    fused_or_split,
    shifted,
    with_action,
    with_row,
)
from .row_removals import await_of, awaits_of, places_of, without_places

Away = tuple[int, int, int, Action]
"""What could be away: its rank, the places before which it leaves and comes back, and its use."""


def changes_for(measures: Sequence[str], costs: Costs) -> list[Change]:
    """The changes by which these measures come and go; one that is to be tried often, often."""
    taken: list[Change] = []
    if "offload" in measures:
        taken += [_offloaded, _strictly_offloaded]
    if "recompute" in measures:
        taken.append(_recomputed)
    if "balance" in measures and len(set(_ranks(costs))) > 1:
        taken += [_evicted, _strictly_evicted]
    found: list[Change] = [*[shifted] * 4, filled]
    if "offload" in measures or "balance" in measures:
        found.append(partial(_resized, costs))
    if taken:
        found += [*taken, _dropped, *(_instead(each) for each in taken)]
        found += [_awaited] * ("offload" in measures or "balance" in measures)
    if any(size.deferred > size.saved for size in costs.memory) or costs.full is not None:
        found.append(fused_or_split)
    return found


def _ranks(costs: Costs) -> range:
    return range(len(costs.times))


def _instead(take: Change) -> Change:
    """One measure less, and another in its place."""

    def change(schedule: Schedule, starts: Starts, chance: random.Random) -> Schedule | None:
        dropped = _dropped(schedule, starts, chance)
        return None if dropped is None else take(dropped, starts, chance)

    return change


def _dropped(schedule: Schedule, starts: Starts, chance: random.Random) -> Schedule | None:
    """A measure less."""
    again = [
        (rank, place)
        for rank, row in enumerate(schedule.ranks)
        for place, action in enumerate(row)
        if action.kind is ActionKind.RECOMPUTE
    ]
    journeys = journeys_of(schedule)
    if not again and not journeys:
        return None
    chosen = chance.randrange(len(again) + len(journeys))
    if chosen < len(again):
        rank, place = again[chosen]
        return without_places(schedule, {rank: {place}})
    journey = journeys[chosen - len(again)]
    return without_places(schedule, places_of(schedule, journey))


def _awaited(schedule: Schedule, starts: Starts, chance: random.Random) -> Schedule | None:
    """A rank that waits for one more departure, or for one less."""
    journeys = journeys_of(schedule)
    if not journeys:
        return None
    journey = chance.choice(journeys)
    waiting = set(awaits_of(schedule, journey))
    if waiting:
        return without_places(schedule, {journey.rank: waiting})
    place = chance.randint(journey.leaves + 1, min(journey.leaves + 2, journey.comes))
    return with_action(schedule, journey.rank, place, await_of(journey))


def _offloaded(schedule: Schedule, starts: Starts, chance: random.Random) -> Schedule | None:
    """Something more goes to the host, beside computation."""
    found = _journey(schedule, chance)
    return None if found is None else offloaded(schedule, found)


def _strictly_offloaded(
    schedule: Schedule, starts: Starts, chance: random.Random
) -> Schedule | None:
    """Something more goes to the host, and the rank waits until it has left."""
    found = _journey(schedule, chance)
    if found is None:
        return None
    _, leaves, comes, _ = found
    return offloaded(schedule, found, wait=chance.randint(leaves, min(leaves + 1, comes)))


def offloaded(schedule: Schedule, found: Away, *, wait: int | None = None) -> Schedule:
    """What a rank holds goes to the host; the rank waits before a place until it has left."""
    rank, leaves, comes, what = found
    row = schedule.ranks[rank]
    out = (replace(what, kind=ActionKind.OFFLOAD), *row[leaves:comes])
    if wait is not None:
        at = wait - leaves + 1
        out = (*out[:at], replace(what, kind=ActionKind.AWAIT), *out[at:])
    back = replace(what, kind=ActionKind.RELOAD)
    return with_row(schedule, rank, (*row[:leaves], *out, back, *row[comes:]))


def _journey(schedule: Schedule, chance: random.Random) -> Away | None:
    """Something that stays at a rank and could leave and come back."""
    rank = chance.randrange(len(schedule.ranks))
    able = [each for each in held(schedule.ranks[rank]) if each[1] > each[0] + 1]
    if not able:
        return None
    made, used = chance.choice(able)
    leaves = chance.randint(made + 1, min(made + 3, used))
    comes = chance.randint(max(leaves, used - 4), used)
    return rank, leaves, comes, schedule.ranks[rank][used]


def _evicted(schedule: Schedule, starts: Starts, chance: random.Random) -> Schedule | None:
    """Something more goes to the partner, which takes it in about when it leaves."""
    return _sent(schedule, starts, chance, waits=False)


def _strictly_evicted(schedule: Schedule, starts: Starts, chance: random.Random) -> Schedule | None:
    """The same, and each of the two waits until what it sends has left."""
    return _sent(schedule, starts, chance, waits=True)


def _sent(
    schedule: Schedule, starts: Starts, chance: random.Random, *, waits: bool
) -> Schedule | None:
    found = _journey(schedule, chance)
    return None if found is None else sent(schedule, starts, chance, found, waits=waits)


def sent(
    schedule: Schedule,
    starts: Starts,
    chance: random.Random,
    found: Away,
    *,
    waits: bool,
) -> Schedule | None:
    """What a rank holds goes to its partner; where asked for, who sends waits until it has left."""
    count = len(schedule.ranks)
    partners = schedule.partners or tuple(range(count - 1, -1, -1))
    if partners[found[0]] == found[0]:
        return None
    rank, leaves, comes, what = found
    row, partner = schedule.ranks[rank], partners[found[0]]
    theirs = list(schedule.ranks[partner])
    clock = [starts.get(action, -1.0) for action in row]
    changed = list(row)
    awaits = [replace(what, kind=ActionKind.AWAIT)] if waits else []
    # The later end first, so that the places of the earlier one hold.
    for place, own, other in (
        (comes, ActionKind.LOAD, ActionKind.RETURN),
        (leaves, ActionKind.EVICT, ActionKind.ACCEPT),
    ):
        moment = max(clock[:place], default=0.0)
        before = sum(action.kind in TRANSFERS for action in row[:place])
        at = _place_by(theirs, moment, before, starts)
        if waits and chance.random() < 0.5 and at < len(theirs) and theirs[at].kind.is_compute:
            at += 1
        changed.insert(place, replace(what, kind=own))
        theirs.insert(at, replace(what, kind=other))
        if waits and own is ActionKind.EVICT:
            wait = place + chance.randint(1, 2)
            changed[min(wait, comes + 1) : min(wait, comes + 1)] = awaits
        elif waits and chance.random() < 0.5:
            theirs[at + 1 : at + 1] = awaits
    rows = list(schedule.ranks)
    rows[rank], rows[partner] = tuple(changed), tuple(theirs)
    return replace(schedule, ranks=tuple(rows), partners=partners)


def _place_by(row: Sequence[Action], moment: float, before: int, starts: Starts) -> int:
    """The place in a row that is reached by a moment, behind so many of its transfers."""
    transfers = [place for place, action in enumerate(row) if action.kind in TRANSFERS]
    first = transfers[before - 1] + 1 if before else 0
    last = transfers[before] if before < len(transfers) else len(row)
    place = first
    while place < last and starts.get(row[place], -1.0) <= moment:
        place += 1
    return place


def _resized(
    costs: Costs, schedule: Schedule, starts: Starts, chance: random.Random
) -> Schedule | None:
    """Of what is moved of a stage another part travels, or all."""
    journeys = journeys_of(schedule)
    if not journeys:
        return None
    stage = chance.choice(journeys).stage
    size = costs.memory[stage]
    moved = {each: most for each, most in schedule.moved.items() if each != stage}
    if size.tensors > 1 and chance.random() < 0.5:
        share = chance.randint(1, size.tensors - 1) / size.tensors
        moved[stage] = math.ceil(share * max(size.saved, size.deferred))
    return None if moved == schedule.moved else replace(schedule, moved=moved)


def _recomputed(schedule: Schedule, starts: Starts, chance: random.Random) -> Schedule | None:
    """Something more is made again."""
    rank = chance.randrange(len(schedule.ranks))
    row = schedule.ranks[rank]
    able = [
        (made, used)
        for made, used in held(row)
        if row[made].kind is ActionKind.FORWARD and row[used].kind in BACKWARDS
    ]
    if not able:
        return None
    made, used = chance.choice(able)
    place = chance.randint(max(made + 1, used - 3), used)
    again = replace(row[used], kind=ActionKind.RECOMPUTE)
    return with_action(schedule, rank, place, again)


def held(row: Row) -> Iterator[tuple[int, int]]:
    """Places of what makes and of what uses something that stays here meanwhile."""
    latest: dict[tuple[int, int], int] = {}
    for place, action in enumerate(row):
        if action.kind in (ActionKind.ACCEPT, ActionKind.RETURN):
            continue
        key = action.stage, action.microbatch
        made = latest.get(key)
        if made is not None and row[made].kind.is_compute and not action.kind.is_memory:
            yield made, place
        latest[key] = place
