"""Local search: change a schedule at one place after another, within caps of memory.

Simulated annealing (van Laarhoven, Aarts and Lenstra, Operations Research 40, 1992), with what
exceeds a cap as a price on the step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.pipeline.schedule.moves import journeys_of
from autosplit.pipeline.schedule.schedule import Schedule

from .changes import Change, changes_for
from .problem import PlayedOrder, Problem

_FEWEST = 20  # orders that are tried, however large they are
_HEAT = 0.015  # of a step: by so much longer ones are kept at first
_HEAT_OF_MEASURES = 0.03  # where measures are taken, of which each is dearer
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
    measures: Sequence[str] = (),
    *,
    least: float = 0.0,
) -> PlayedOrder | None:
    """The shortest that is found from ``start`` within the problem's caps; None if none is.

    Deterministic: the same arguments give the same order.

    Args:
        start: a legal schedule, within the caps or not.
        problem: of the step.
        work: actions to play in all.
        measures: which may be taken.
        least: seconds that no step undercuts: what takes as little ends the search.
    """
    heat = _HEAT_OF_MEASURES if measures else _HEAT
    walk = _Walk(problem, changes_for(measures, problem), heat, least)
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

    def __init__(
        self, problem: Problem, changes: Sequence[Change], heat: float, least: float
    ) -> None:
        self._problem = problem
        self._changes = changes
        self._heat = heat
        self._least = least
        self._chance = random.Random(0)

    def is_done(self, best: _Tried) -> bool:
        """Whether nothing can be shorter."""
        return best.fits and best.played.makespan * _SAME <= self._least

    def cooled(self, best: _Tried, work: int) -> _Tried:
        """The best on one way from ``best``, of so many actions."""
        here, chance, tally = best, self._chance, self._problem.tally
        hot = self._heat * here.price
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
