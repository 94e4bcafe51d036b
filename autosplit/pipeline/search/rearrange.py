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
from autosplit.pipeline.simulation.row_player import PlayedRows

from .row_changes import Change, changes_for

_FEWEST = 20  # orders that are tried, however large they are
_HEAT = 0.03  # of a step: by so much longer ones are kept at first
_PRICE = 3.0  # of a step, for as much as the limit too much
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
    best = here = _try(start, costs, caps)
    if best is None or here is None:
        return None
    chance = random.Random(0)
    changes = changes_for(measures, costs)
    tries = max(_FEWEST, work // max(1, sum(map(len, start.ranks))))
    for left in range(_ROUNDS, 0, -1):
        spent = tries // left
        tries -= spent
        best = _annealed(best, costs, caps, changes, spent, chance, least)
        if best.fits and best.played.makespan <= least:
            break
    return best.schedule if best.fits else None


def _annealed(
    best: _Tried,
    costs: CountedCosts,
    caps: Sequence[float],
    changes: Sequence[Change],
    tries: int,
    chance: random.Random,
    least: float,
) -> _Tried:
    """Random changes from ``best``, dearer ones less and less likely to be kept."""
    here = best
    hot = _HEAT * here.price
    for count in range(tries):
        if best.fits and best.played.makespan <= least:
            break
        tried = _changed(here, costs, caps, changes, chance)
        if tried is None:
            continue
        heat = hot * (1 - count / tries) ** 2
        worse = tried.price - here.price
        if worse <= 0 or (heat > 0 and chance.random() < math.exp(-worse / heat)):
            here = tried
        if (not tried.fits, tried.price) < (not best.fits, best.price * _SAME):
            best = tried
    return best


def _changed(
    here: _Tried,
    costs: CountedCosts,
    caps: Sequence[float],
    changes: Sequence[Change],
    chance: random.Random,
) -> _Tried | None:
    """One change more, now and then two: where the first alone would be over the limit."""
    schedule, starts = here.schedule, here.played.starts
    for _ in range(1 + (chance.random() < _TWICE)):
        changed = chance.choice(changes)(schedule, starts, chance)
        schedule = schedule if changed is None else changed
    return None if schedule is here.schedule else _try(schedule, costs, caps)


def _try(schedule: Schedule, costs: CountedCosts, caps: Sequence[float]) -> _Tried | None:
    """What a schedule costs; None if it cannot run."""
    played = costs.rows_played(schedule)
    if played is None:
        return None
    over = sum(
        max(0.0, peak / cap - ROUNDING)
        for peak, cap in zip(played.peaks, caps, strict=True)
        if cap > 0
    )
    return _Tried(schedule, played, played.makespan * (1 + _PRICE * over), over == 0.0)
