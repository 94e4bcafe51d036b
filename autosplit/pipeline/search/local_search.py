"""Local search: change a schedule at one place after another, within caps of memory.

An action goes elsewhere in its row, or an I and its W become a B: what is legal stays so. Ranks
share rows with the schedule
before wherever they are not changed. What exceeds a cap is a price on the step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import journeys_of
from autosplit.pipeline.schedule.schedule import Schedule

from .problem import PlayedOrder, Problem

_TRANSFERS = (ActionKind.EVICT, ActionKind.LOAD, ActionKind.ACCEPT, ActionKind.RETURN)
"""What partners carry out in one order."""
_BACKWARDS = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD)
_WEIGHTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
_IN_ORDER = ((ActionKind.FORWARD,), _BACKWARDS, _WEIGHTS)

_FEWEST = 20  # orders that are tried, however large they are
_PRICE = 3.0  # of a step, for as much as the limit too much
_SAME = 1 - 1e-9


@dataclass(frozen=True)
class _Tried:
    played: PlayedOrder
    price: float
    fits: bool


def improve(
    start: Schedule,
    problem: Problem,
    work: int,
    *,
    least: float = 0.0,
) -> PlayedOrder | None:
    """The shortest that is found from ``start`` within the problem's caps; None if none is.

    Deterministic: the same arguments give the same order. Changes that make nothing dearer are
    kept.

    Args:
        start: a legal schedule, within the caps or not.
        problem: of the step.
        work: actions of all orders that are tried.
        least: seconds that no step undercuts: what takes as little ends the search.
    """
    chance = random.Random(0)
    best = here = _tried(start, problem, least, math.inf)
    if best is None or here is None:
        return None
    changes = [*[_critical] * 5, *[_fused_or_split] * any(problem.whole)]
    for _ in range(max(_FEWEST, work // sum(map(len, start.ranks)))):
        if best.fits and best.played.makespan * _SAME <= least:
            break
        changed = chance.choice(changes)(here.played, chance)
        tried = None if changed is None else _tried(changed, problem, least, here.price)
        if tried is None or tried.price > here.price:
            continue
        here = tried
        if (not here.fits, here.price) < (not best.fits, best.price * _SAME):
            best = here
    return best.played if best.fits else None


def _tried(schedule: Schedule, problem: Problem, least: float, most: float) -> _Tried | None:
    """What a schedule costs; None if it cannot run, or its memory alone is dearer than that."""
    journeys = journeys_of(schedule)
    over = problem.over(schedule, journeys)
    price = 1 + _PRICE * over
    if least * price > most:
        return None
    played = problem.play(schedule, journeys)
    return None if played is None else _Tried(played, played.makespan * price, over == 0.0)


def _critical(here: PlayedOrder, chance: random.Random) -> Schedule | None:
    """An action of a stretch of the critical path goes elsewhere in it; None where it cannot.

    The neighbourhood is that of job-shop scheduling (van Laarhoven, Aarts and Lenstra, Operations
    Research 40, 1992): only a change of neighbours on a critical path can shorten a schedule.
    """
    rank, block = chance.choice(here.blocks)
    row = here.schedule.ranks[rank]
    source, goal = (row.index(chance.choice(block)) for _ in range(2))
    return _towards(here.schedule, rank, source, goal)


def _towards(schedule: Schedule, rank: int, source: int, goal: int) -> Schedule | None:
    """An action goes towards a place, as far as what it must not pass."""
    row, target = schedule.ranks[rank], source
    step = 1 if goal > source else -1
    while target != goal and 0 <= target + step < len(row):
        if _tied(row[source], row[target + step]):
            break
        target += step
    if target == source:
        return None
    changed = [*row]
    changed.insert(target, changed.pop(source))
    return _with_row(schedule, rank, changed)


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
    rank = chance.randrange(len(here.schedule.ranks))
    row = [*here.schedule.ranks[rank]]
    place = chance.choice([at for at, action in enumerate(row) if action.kind in _BACKWARDS])
    action = row[place]
    weight = replace(action, kind=ActionKind.BACKWARD_WEIGHT)
    if action.kind is ActionKind.BACKWARD:
        row[place : place + 1] = replace(action, kind=ActionKind.BACKWARD_INPUT), weight
        return _with_row(here.schedule, rank, row)
    tied = (other for other in row[place + 1 :] if _tied(weight, other))
    if next(tied) != weight:  # gradients would add up in another order, or something moves before
        return None
    row[place] = replace(action, kind=ActionKind.BACKWARD)
    row.remove(weight)
    return _with_row(here.schedule, rank, row)


def _with_row(schedule: Schedule, rank: int, row: Sequence[Action]) -> Schedule:
    ranks = (*schedule.ranks[:rank], tuple(row), *schedule.ranks[rank + 1 :])
    return replace(schedule, ranks=ranks)
