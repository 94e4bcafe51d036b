"""Changes of the order in which ranks compute, which keep it legal."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule

Row = tuple[Action, ...]
Starts = Mapping[Action, float]
Change = Callable[[Schedule, Starts, random.Random], Schedule | None]
"""The schedule changed at one place by chance, given how it runs; None where that cannot be."""

TRANSFERS = (ActionKind.EVICT, ActionKind.LOAD, ActionKind.ACCEPT, ActionKind.RETURN)
"""What partners carry out in one order."""
BACKWARDS = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD)

_REACH = 6  # places that an action is shifted by, mostly
_WEIGHTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
_IN_ORDER = ((ActionKind.FORWARD,), BACKWARDS, _WEIGHTS)


def shifted(schedule: Schedule, starts: Starts, chance: random.Random) -> Schedule | None:
    """An action goes elsewhere, as far as what it must not pass."""
    rank = chance.randrange(len(schedule.ranks))
    row = schedule.ranks[rank]
    source = chance.randrange(len(row))
    step = chance.choice((-1, 1))
    most = chance.randint(1, _REACH if chance.random() < 0.8 else len(row))
    target = source
    while (
        0 <= target + step < len(row)
        and abs(target - source) < most
        and not tied(row[source], row[target + step])
    ):
        target += step
    if target == source:
        return None
    return with_shift(schedule, rank, source, target)


def filled(schedule: Schedule, starts: Starts, chance: random.Random) -> Schedule | None:
    """Something comes forward to where its rank waits."""
    rank = chance.randrange(len(schedule.ranks))
    row = schedule.ranks[rank]
    target = chance.randrange(len(row))
    source = target + chance.randint(1, 2 * _REACH)
    while target > 0 and not row[target - 1].kind.is_compute:
        target -= 1  # what is to hide behind it, behind it
    if source >= len(row) or any(tied(row[source], each) for each in row[target:source]):
        return None
    return with_shift(schedule, rank, source, target)


def with_shift(schedule: Schedule, rank: int, source: int, target: int) -> Schedule:
    """The schedule with one action of a rank at another place of its row."""
    row = schedule.ranks[rank]
    left = (*row[:source], *row[source + 1 :])
    return with_row(schedule, rank, (*left[:target], row[source], *left[target:]))


def with_action(schedule: Schedule, rank: int, place: int, action: Action) -> Schedule:
    """The schedule with one action more in the row of a rank."""
    row = schedule.ranks[rank]
    return with_row(schedule, rank, (*row[:place], action, *row[place:]))


def tied(one: Action, other: Action) -> bool:
    """Whether two actions of a rank must keep their order."""
    if one.kind in TRANSFERS and other.kind in TRANSFERS:
        return True
    if one.stage != other.stage:
        return False
    # Channels are first in, first out, and gradients add up in one order, with one rounding.
    fifo = any(one.kind in kinds and other.kind in kinds for kinds in _IN_ORDER)
    return fifo or one.microbatch == other.microbatch


def fused_or_split(schedule: Schedule, starts: Starts, chance: random.Random) -> Schedule | None:
    """An I and its W become a B, or a B becomes them."""
    rank = chance.randrange(len(schedule.ranks))
    row = schedule.ranks[rank]
    able = [place for place, action in enumerate(row) if action.kind in BACKWARDS]
    place = chance.choice(able)
    action = row[place]
    inputs = replace(action, kind=ActionKind.BACKWARD_INPUT)
    weights = replace(action, kind=ActionKind.BACKWARD_WEIGHT)
    if action.kind is ActionKind.BACKWARD:
        return with_row(schedule, rank, (*row[:place], inputs, weights, *row[place + 1 :]))
    own = [at for at in range(place + 1, len(row)) if _same(row[at], action)]
    if [row[at] for at in own] != [weights] or any(
        each.stage == action.stage and each.kind in _WEIGHTS for each in row[place : own[0]]
    ):
        return None
    whole = replace(action, kind=ActionKind.BACKWARD)
    return with_row(
        schedule, rank, (*row[:place], whole, *row[place + 1 : own[0]], *row[own[0] + 1 :])
    )


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


def with_row(schedule: Schedule, rank: int, row: Row) -> Schedule:
    ranks = (*schedule.ranks[:rank], row, *schedule.ranks[rank + 1 :])
    return replace(schedule, ranks=ranks)
