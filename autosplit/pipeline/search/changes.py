"""Changes of a schedule that keep it legal: what local search steps by.

An action goes elsewhere in its row, an I and its W become a B, a measure of memory is taken or
dropped. Ranks share rows with the schedule before wherever they are not changed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import Journey, journeys_of
from autosplit.pipeline.schedule.schedule import Schedule

from .problem import PlayedOrder, Problem, Row

Change = Callable[[PlayedOrder, random.Random], Schedule | None]
"""A schedule changed at one place by chance, given how it ran; None where that cannot be."""

Stay = tuple[int, int]
"""What stays at a rank: the places of what makes it and of what uses it."""

_TRANSFERS = (ActionKind.EVICT, ActionKind.LOAD, ActionKind.ACCEPT, ActionKind.RETURN)
"""What partners carry out in one order."""
_BACKWARDS = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD)
_WEIGHTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
_IN_ORDER = ((ActionKind.FORWARD,), _BACKWARDS, _WEIGHTS)

_REACH = 6  # places that an action is shifted by, mostly
_WEIGHTED = {"offload": 2, "recompute": 1, "balance": 2}  # how often each measure is tried
_RELIEF = 4  # times as often as another change, what takes measures where there is too much
_RELIEVED = 3  # measures that are taken at once, at most
_LAST = 0.7  # of the choices of what goes away fall on what is used last
_PULLED = 0.8  # of the changes that take measures begin with an F that comes forward


def changes_for(measures: Sequence[str], problem: Problem) -> list[Change]:
    """The changes that a search steps by; one that is to be tried often, often.

    Args:
        measures: those that may be taken.
        problem: of the step.
    """
    found: list[Change] = [*[_critical] * (4 if measures else 8), _filled]
    if any(problem.whole):
        found.append(_fused_or_split)
    if measures:
        often = [measure for measure in measures for _ in range(_WEIGHTED[measure])]
        found += [*[partial(_taken, often)] * len(often), _dropped]
        found += [partial(_instead, often)] * len(often)
        found += [partial(_relieved, measures)] * _RELIEF
        found += [*[_shifted] * 4, _awaited, _awaited, _resized]
    return found


# --- the order in which ranks compute -------------------------------------------------------------


def _shifted(here: PlayedOrder, chance: random.Random) -> Schedule | None:
    """An action goes elsewhere, as far as what it must not pass."""
    rank, row = _any_row(here, chance)
    source, step = chance.randrange(len(row)), chance.choice((-1, 1))
    most = chance.randint(1, _REACH if chance.random() < 0.8 else len(row))
    return _towards(here.schedule, rank, source, source + step * most)


def _critical(here: PlayedOrder, chance: random.Random) -> Schedule | None:
    """An action of a stretch of the critical path goes elsewhere in it.

    The neighbourhood is that of job-shop scheduling (van Laarhoven, Aarts and Lenstra, Operations
    Research 40, 1992): only a change of neighbours on a critical path can shorten a schedule.
    """
    rank, block = chance.choice(here.blocks)
    one, other, row = chance.choice(block), chance.choice(block), here.schedule.ranks[rank]
    if one not in row or other not in row:  # after another change
        return None
    return _towards(here.schedule, rank, row.index(one), row.index(other))


def _filled(here: PlayedOrder, chance: random.Random) -> Schedule | None:
    """Something comes forward to where its rank waits."""
    rank, row = _any_row(here, chance)
    target = chance.randrange(len(row))
    source = target + chance.randint(1, 2 * _REACH)
    while target > 0 and not row[target - 1].kind.is_compute:
        target -= 1  # what is to hide behind it, behind it
    if source >= len(row) or any(_tied(row[source], each) for each in row[target:source]):
        return None
    return _with_shift(here.schedule, rank, source, target)


def _any_row(here: PlayedOrder, chance: random.Random) -> tuple[int, Row]:
    rank = chance.randrange(len(here.schedule.ranks))
    return rank, here.schedule.ranks[rank]


def _towards(schedule: Schedule, rank: int, source: int, goal: int) -> Schedule | None:
    """An action goes towards a place, as far as what it must not pass."""
    row, target = schedule.ranks[rank], source
    step = 1 if goal > source else -1
    while target != goal and 0 <= target + step < len(row):
        if _tied(row[source], row[target + step]):
            break
        target += step
    return None if target == source else _with_shift(schedule, rank, source, target)


def _with_shift(schedule: Schedule, rank: int, source: int, target: int) -> Schedule:
    row = [*schedule.ranks[rank]]
    row.insert(target, row.pop(source))
    return _with_row(schedule, rank, row)


def _tied(one: Action, other: Action) -> bool:
    """Whether two actions of a rank must keep their order."""
    if one.kind in _TRANSFERS and other.kind in _TRANSFERS:
        return True
    if one.stage != other.stage:
        return False
    # Channels are first in, first out, and gradients add up in one order, with one rounding.
    fifo = any(one.kind in kinds and other.kind in kinds for kinds in _IN_ORDER)
    return fifo or one.microbatch == other.microbatch


def _fused_or_split(here: PlayedOrder, chance: random.Random) -> Schedule | None:
    """An I and its W become a B, or a B becomes them."""
    rank, row = _any_row(here, chance)
    place = chance.choice([at for at, action in enumerate(row) if action.kind in _BACKWARDS])
    action = row[place]
    inputs = replace(action, kind=ActionKind.BACKWARD_INPUT)
    weights = replace(action, kind=ActionKind.BACKWARD_WEIGHT)
    if action.kind is ActionKind.BACKWARD:
        return _with_row(here.schedule, rank, (*row[:place], inputs, weights, *row[place + 1 :]))
    own = [at for at in range(place + 1, len(row)) if _same(row[at], action)]
    if [row[at] for at in own] != [weights] or any(
        each.stage == action.stage and each.kind in _WEIGHTS for each in row[place : own[0]]
    ):
        return None
    whole = replace(action, kind=ActionKind.BACKWARD)
    between, behind = row[place + 1 : own[0]], row[own[0] + 1 :]
    return _with_row(here.schedule, rank, (*row[:place], whole, *between, *behind))


def _same(one: Action, other: Action) -> bool:
    return (one.stage, one.microbatch) == (other.stage, other.microbatch)


def adds_in_order(schedule: Schedule) -> bool:
    """Whether every stage adds gradients up in the order of its microbatches, with the rounding of
    any other schedule that does. Changes keep that.
    """
    last: dict[int, int] = {}
    for row in schedule.ranks:
        for action in row:
            if action.kind in _WEIGHTS:
                if last.get(action.stage, -1) > action.microbatch:
                    return False
                last[action.stage] = action.microbatch
    return True


def _with_row(schedule: Schedule, rank: int, row: Sequence[Action]) -> Schedule:
    ranks = (*schedule.ranks[:rank], tuple(row), *schedule.ranks[rank + 1 :])
    return replace(schedule, ranks=ranks)


# --- measures that are taken ----------------------------------------------------------------------


def _taken(measures: Sequence[str], here: PlayedOrder, chance: random.Random) -> Schedule | None:
    """A measure more, anywhere."""
    rank, row = _any_row(here, chance)
    able = [each for each in _stays(row) if each[1] > each[0] + 1]
    return _away(here, chance, chance.choice(measures), rank, chance.choice(able)) if able else None


def _relieved(measures: Sequence[str], here: PlayedOrder, chance: random.Random) -> Schedule | None:
    """An F comes forward, and what is too much because of it goes away: each of the two alone is
    dearer than neither, so single changes seldom come to both.
    """
    found = _pulled(here, chance) if chance.random() < _PULLED else None
    for _ in range(_RELIEVED):
        relieved = _relieved_once(measures, here.changed(found), chance)
        if relieved is None:
            break
        found = relieved
    return found


def early(measures: Sequence[str], here: PlayedOrder) -> Schedule:
    """All Fs first, and away what is too much because of them, as far as the measures can."""
    rows = tuple(
        tuple(sorted(row, key=lambda action: action.kind is not ActionKind.FORWARD))
        for row in here.schedule.ranks
    )
    here, chance = here.changed(replace(here.schedule, ranks=rows)), random.Random(0)
    for _ in range(2 * sum(map(len, rows))):
        here = here.changed(_relieved_once(measures, here, chance))
    return here.schedule


def _pulled(here: PlayedOrder, chance: random.Random) -> Schedule | None:
    """An F comes forward past some of what its rank computes."""
    rank, row = _any_row(here, chance)
    source = chance.choice([at for at, a in enumerate(row) if a.kind is ActionKind.FORWARD])
    passed = [at for at in range(source) if row[at].kind.is_compute][-chance.randint(1, 3) :]
    return _towards(here.schedule, rank, source, passed[0]) if passed else None


def _relieved_once(
    measures: Sequence[str], here: PlayedOrder, chance: random.Random
) -> Schedule | None:
    """Something that a rank holds without need goes away before the first place where it holds too
    much; None if no rank does.
    """
    over = here.problem.first_over(here.schedule)
    if over is None:
        return None
    rank, place = over
    able = [each for each in _stays(here.schedule.ranks[rank]) if each[0] < place < each[1]]
    if not able:
        return None
    stay = chance.choice(able)
    if chance.random() < _LAST:
        stay = max(able, key=lambda each: each[1])
    return _away(here, chance, chance.choice(measures), rank, stay, before=place)


def _stays(row: Row) -> Iterator[Stay]:
    """What stays at a rank between what makes and what uses it."""
    latest: dict[tuple[int, int], int] = {}
    for place, action in enumerate(row):
        if action.kind in (ActionKind.ACCEPT, ActionKind.RETURN):
            continue
        key = action.stage, action.microbatch
        made = latest.get(key)
        if made is not None and row[made].kind.is_compute and not action.kind.is_memory:
            yield made, place
        latest[key] = place


def _away(
    here: PlayedOrder,
    chance: random.Random,
    measure: str,
    rank: int,
    stay: Stay,
    *,
    before: int | None = None,
) -> Schedule | None:
    """A measure is taken on what stays at a rank, which is to be away ``before`` some place."""
    made, used = stay
    row = here.schedule.ranks[rank]
    what = row[used]
    if measure == "recompute":
        if row[made].kind is not ActionKind.FORWARD or what.kind not in _BACKWARDS:
            return None
        at = chance.randint(max(made + 1, used - 3), used) if before is None else used
        return _with_more(here.schedule, rank, [(at, ActionKind.RECOMPUTE)], what)
    if before is None:
        leaves = chance.randint(made + 1, min(made + 3, used))
        comes = chance.randint(max(leaves, used - 4), used)
    else:
        leaves = chance.randint(made + 1, min(made + 2, before))
        comes = chance.randint(max(before + 1, used - 2), used)
    waits = chance.random() < 0.5
    if measure == "balance":
        return _sent(here, chance, rank, leaves, comes, what, waits=waits)
    moves = [(comes, ActionKind.RELOAD), (leaves, ActionKind.OFFLOAD)]
    if before is not None or waits:
        wait = chance.randint(leaves, min(leaves + 1, comes)) if before is None else before
        moves.insert(1, (wait, ActionKind.AWAIT))
    return _with_more(here.schedule, rank, moves, what)


def _with_more(
    schedule: Schedule, rank: int, more: Sequence[tuple[int, ActionKind]], what: Action
) -> Schedule:
    """The schedule with further actions on one microbatch, each before a place of a row, the last
    place first.
    """
    row = [*schedule.ranks[rank]]
    for place, kind in more:
        row.insert(place, replace(what, kind=kind))
    return _with_row(schedule, rank, row)


def _sent(
    here: PlayedOrder,
    chance: random.Random,
    rank: int,
    leaves: int,
    comes: int,
    what: Action,
    *,
    waits: bool,
) -> Schedule | None:
    """What a rank holds goes to its partner; where asked for, who sends waits until it has left."""
    schedule = here.schedule
    count = len(schedule.ranks)
    partners = schedule.partners or tuple(range(count - 1, -1, -1))
    partner = partners[rank]
    if partner == rank:
        return None
    row, theirs = schedule.ranks[rank], schedule.ranks[partner]
    own: list[tuple[int, ActionKind]] = [(comes, ActionKind.LOAD), (leaves, ActionKind.EVICT)]
    others: list[tuple[int, ActionKind]] = []
    for place, kind in (comes, ActionKind.RETURN), (leaves, ActionKind.ACCEPT):
        moment = max(map(here.start, row[:place]), default=0.0)
        before = sum(action.kind in _TRANSFERS for action in row[:place])
        at = _place_by(theirs, moment, before, here)
        if waits and chance.random() < 0.5 and at < len(theirs) and theirs[at].kind.is_compute:
            at += 1
        at = min([at, *(place for place, _ in others)])  # it is taken in before it is given back
        if waits and kind is ActionKind.RETURN and chance.random() < 0.5:
            others.append((at, ActionKind.AWAIT))
        others.append((at, kind))
    if waits:
        own.insert(1, (min(leaves + chance.randint(0, 1), comes), ActionKind.AWAIT))
    made = replace(_with_more(schedule, rank, own, what), partners=partners)
    return _with_more(made, partner, others, what)


def _place_by(row: Sequence[Action], moment: float, before: int, here: PlayedOrder) -> int:
    """The place in a row that is reached by a moment, behind so many of its transfers."""
    transfers = [place for place, action in enumerate(row) if action.kind in _TRANSFERS]
    first = transfers[before - 1] + 1 if before else 0
    last = transfers[before] if before < len(transfers) else len(row)
    place = first
    while place < last and here.start(row[place]) <= moment:
        place += 1
    return place


# --- measures that are dropped or changed ---------------------------------------------------------


def _instead(measures: Sequence[str], here: PlayedOrder, chance: random.Random) -> Schedule | None:
    """One measure less, and another in its place."""
    dropped = _dropped(here, chance)
    return None if dropped is None else _taken(measures, here.changed(dropped), chance)


def _dropped(here: PlayedOrder, chance: random.Random) -> Schedule | None:
    """A measure less."""
    schedule = here.schedule
    every = [*_recomputes(schedule), *(_places_of(schedule, j) for j in journeys_of(schedule))]
    return _without(schedule, chance.choice(every)) if every else None


def _awaited(here: PlayedOrder, chance: random.Random) -> Schedule | None:
    """A rank that waits for one more departure, or for one less."""
    journeys = journeys_of(here.schedule)
    if not journeys:
        return None
    journey = chance.choice(journeys)
    waiting = set(_awaits_of(here.schedule, journey))
    if waiting:
        return _without(here.schedule, {journey.rank: waiting})
    at = chance.randint(journey.leaves + 1, min(journey.leaves + 2, journey.comes))
    more = [(at, ActionKind.AWAIT)]
    return _with_more(here.schedule, journey.rank, more, _await_of(journey))


def _resized(here: PlayedOrder, chance: random.Random) -> Schedule | None:
    """Of what is moved of a stage another part travels, or all."""
    schedule = here.schedule
    journeys = journeys_of(schedule)
    if not journeys:
        return None
    stage = chance.choice(journeys).stage
    size = here.problem.costs.memory[stage]
    moved = {each: most for each, most in schedule.moved.items() if each != stage}
    if size.tensors > 1 and chance.random() < 0.5:
        share = chance.randint(1, size.tensors - 1) / size.tensors
        moved[stage] = math.ceil(share * max(size.saved, size.deferred))
    return None if moved == schedule.moved else replace(schedule, moved=moved)


def _recomputes(schedule: Schedule) -> Iterator[dict[int, set[int]]]:
    for rank, row in enumerate(schedule.ranks):
        for place, action in enumerate(row):
            if action.kind is ActionKind.RECOMPUTE:
                yield {rank: {place}}


def _places_of(schedule: Schedule, journey: Journey) -> dict[int, set[int]]:
    """By rank, the places of all that a journey is made of."""
    found = {journey.rank: {journey.leaves, journey.comes, *_awaits_of(schedule, journey)}}
    if journey.partner is not None:
        theirs = schedule.ranks[journey.partner]
        found[journey.partner] = {journey.accepted, journey.returned}
        for place in range(journey.returned + 1, len(theirs)):
            if theirs[place] == _await_of(journey):
                found[journey.partner].add(place)
            elif _same(theirs[place], _await_of(journey)):
                break  # the next journey of the same
    return found


def _awaits_of(schedule: Schedule, journey: Journey) -> Iterator[int]:
    """Places of what waits for a journey's departure."""
    row = schedule.ranks[journey.rank]
    for place in range(journey.leaves + 1, journey.comes):
        if row[place] == _await_of(journey):
            yield place


def _await_of(journey: Journey) -> Action:
    return Action(journey.stage, ActionKind.AWAIT, journey.microbatch)


def _without(schedule: Schedule, gone: Mapping[int, set[int]]) -> Schedule:
    """The schedule without some places of its rows."""
    rows: list[Row] = list(schedule.ranks)
    for rank, places in gone.items():
        rows[rank] = tuple(a for place, a in enumerate(rows[rank]) if place not in places)
    return replace(schedule, ranks=tuple(rows))
