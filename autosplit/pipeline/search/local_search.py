"""Local search: change a schedule at one place after another, within caps of memory.

An action goes elsewhere in its row, or an I and its W become a B: what is legal stays so. Ranks
share rows with the schedule before wherever they are not changed.

Simulated annealing (van Laarhoven, Aarts and Lenstra, Operations Research 40, 1992), with what
exceeds a cap as a price on the step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import journeys_of
from autosplit.pipeline.schedule.schedule import Schedule

from .problem import PlayedOrder, Problem, Row

Change = Callable[[PlayedOrder, random.Random], Schedule | None]
"""A schedule changed at one place by chance, given how it ran; None where that cannot be."""

_TRANSFERS = (ActionKind.EVICT, ActionKind.LOAD, ActionKind.ACCEPT, ActionKind.RETURN)
"""What partners carry out in one order."""
_BACKWARDS = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD)
_WEIGHTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
_IN_ORDER = ((ActionKind.FORWARD,), _BACKWARDS, _WEIGHTS)

_REACH = 6  # places that an action is shifted by, mostly
_FEWEST = 20  # orders that are tried, however large they are
_HEAT = 0.02  # of a step: by so much longer ones are kept at first
_PRICE = 3.0  # of a step, for as much as the limit too much
_ROUNDS = 3  # times of cooling down
_SAME = 1 - 1e-9
_TWICE = 0.3  # of the tries make two changes


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

    Deterministic: the same arguments give the same order.

    Args:
        start: a legal schedule, within the caps or not.
        problem: of the step.
        work: actions to play in all.
        least: seconds that no step undercuts: what takes as little ends the search.
    """
    walk = _Walk(problem, least)
    best = walk.tried(start, math.inf)
    if best is None:
        return None
    work = max(_FEWEST * sum(map(len, start.ranks)), work)
    for left in range(_ROUNDS, 0, -1):
        spent = work // left
        work -= spent
        best = walk.cooled(best, spent)
        if walk.is_done(best):
            break
    return best.played if best.fits else None


class _Walk:
    """Random changes, dearer ones less and less likely to be kept."""

    def __init__(self, problem: Problem, least: float) -> None:
        self._problem = problem
        self._changes: list[Change] = [*[_critical] * 4, _shifted]
        if any(problem.whole):
            self._changes.append(_fused_or_split)
        self._least = least
        self._chance = random.Random(0)

    def is_done(self, best: _Tried) -> bool:
        """Whether nothing can be shorter."""
        return best.fits and best.played.makespan * _SAME <= self._least

    def cooled(self, best: _Tried, work: int) -> _Tried:
        """The best on one way from ``best``, of so many actions."""
        here, chance, tally = best, self._chance, self._problem.tally
        hot = _HEAT * here.price
        begun = tally.actions
        while tally.actions < begun + work and not self.is_done(best):
            tally.actions += 1  # so that an end comes where nothing can be changed
            heat = hot * (1 - min(1.0, (tally.actions - begun) / work)) ** 2
            most = here.price - heat * math.log(1.0 - chance.random())
            changed = self._changed(here)
            tried = None if changed is None else self.tried(changed, most)
            if tried is None:
                continue
            if (not tried.fits, tried.price) < (not best.fits, best.price * _SAME):
                best = tried
            if tried.price <= most:
                here = tried
        return best

    def tried(self, schedule: Schedule, most: float) -> _Tried | None:
        """What a schedule costs; None if it cannot run, or its memory alone is dearer than that."""
        journeys = journeys_of(schedule)
        over = self._problem.over(schedule, journeys)
        price = 1 + _PRICE * over
        if self._least * price > most:
            return None
        played = self._problem.play(schedule, journeys)
        return None if played is None else _Tried(played, played.makespan * price, over == 0.0)

    def _changed(self, here: _Tried) -> Schedule | None:
        """One change more, now and then two: where the first alone would be over the limit."""
        played, chance = here.played, self._chance
        for _ in range(1 + (chance.random() < _TWICE)):
            played = played.changed(chance.choice(self._changes)(played, chance))
        return None if played is here.played else played.schedule


# --- changes --------------------------------------------------------------------------------------


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


def _with_row(schedule: Schedule, rank: int, row: Sequence[Action]) -> Schedule:
    ranks = (*schedule.ranks[:rank], tuple(row), *schedule.ranks[rank + 1 :])
    return replace(schedule, ranks=ranks)
