"""Local search over rows that hold measures of memory: shift an action, take a measure, drop one.

Simulated annealing, as in ``improve``, with what exceeds the limit as a price on the step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING
from autosplit.pipeline.simulation.counted_costs import CountedCosts
from autosplit.pipeline.simulation.rows.row_player import PlayedRows

from .order_changes import Change
from .relief import relief
from .row_changes import changes_for

_FEWEST = 20  # orders that are tried, however large they are
_HEAT = 0.03  # of a step: by so much longer ones are kept at first
_PRICE = 3.0  # of a step, for as much as the limit too much
_RELIEF = 4  # times as often as another change, what takes measures where there is too much
_ROUNDS = 3  # times of cooling down
_SAME = 1 - 1e-9
_TWICE = 0.3  # of the tries make two changes


@dataclass(frozen=True)
class _Tried:
    schedule: Schedule
    played: PlayedRows
    price: float
    fits: bool


def rearrange(
    start: Schedule,
    costs: CountedCosts,
    caps: Sequence[float],
    measures: Sequence[str],
    work: int,
    *,
    least: float = 0.0,
) -> Schedule | None:
    """The shortest that is found from ``start`` within the caps; None if none is.

    Args:
        start: a legal schedule, within the caps or not.
        costs: of every stage.
        caps: per rank, the most it may hold, by order.
        measures: which may be taken.
        work: actions to simulate in all.
        least: seconds that no step undercuts: what takes as little ends the search.
    """
    changes = changes_for(measures, costs)
    if measures:
        changes += [relief(measures, costs, caps)] * _RELIEF
    walk = _Walk(costs, caps, changes, least)
    best = walk.tried(start, math.inf)
    if best is None:
        return None
    work = max(_FEWEST * sum(map(len, start.ranks)), work)
    for left in range(_ROUNDS, 0, -1):
        spent = work // left
        work -= spent
        best = walk.cooled(best, spent)
        if best.fits and best.played.makespan <= least:
            break
    return best.schedule if best.fits else None


class _Walk:
    """Random changes, dearer ones less and less likely to be kept."""

    def __init__(
        self, costs: CountedCosts, caps: Sequence[float], changes: Sequence[Change], least: float
    ) -> None:
        self._costs = costs
        self._caps = caps
        self._changes = changes
        self._least = least
        self._chance = random.Random(0)

    def cooled(self, best: _Tried, work: int) -> _Tried:
        """The best on one way from ``best``, of so many actions."""
        here, chance, tally = best, self._chance, self._costs.tally
        hot = _HEAT * here.price
        begun = tally.actions
        while tally.actions < begun + work:
            if best.fits and best.played.makespan <= self._least:
                break
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
        over = sum(
            max(0.0, peak / cap - ROUNDING)
            for peak, cap in zip(self._costs.rows_peaks(schedule), self._caps, strict=True)
            if cap > 0
        )
        price = 1 + _PRICE * over
        if self._least * price > most:
            return None
        played = self._costs.rows_played(schedule)
        if played is None:
            return None
        return _Tried(schedule, played, played.makespan * price, over == 0.0)

    def _changed(self, here: _Tried) -> Schedule | None:
        """One change more, now and then two: where the first alone would be over the limit."""
        schedule, starts, chance = here.schedule, here.played.starts, self._chance
        for _ in range(1 + (chance.random() < _TWICE)):
            changed = chance.choice(self._changes)(schedule, starts, chance)
            schedule = schedule if changed is None else changed
        return None if schedule is here.schedule else schedule
