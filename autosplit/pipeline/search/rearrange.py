"""Local search over rows that hold measures of memory: shift an action, take a measure, drop one.

Simulated annealing, as in ``improve``, with what exceeds the limit as a price on the step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING
from autosplit.pipeline.simulation.step_costs import Costs

_WORK = 60_000  # actions simulated in all
_MOST = 600  # orders that are tried from one start
_FEWEST = 20
_HEAT = 0.03  # of a step: by so much longer ones are kept at first
_PRICE = 3.0  # of a step, for as much as the limit too much
_REACH = 6  # places that an action is shifted at most

_PARTNERS = (ActionKind.EVICT, ActionKind.LOAD, ActionKind.ACCEPT, ActionKind.RETURN)
_BACKWARDS = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD)

Row = tuple[Action, ...]
Change = Callable[[Row, random.Random], Row | None]


@dataclass(frozen=True)
class _Tried:
    schedule: Schedule
    price: float
    fits: bool


def rearrange(
    start: Schedule, costs: Costs, caps: Sequence[float], measures: Sequence[str], starts: int
) -> Schedule | None:
    """The shortest that is found from ``start`` within the caps; None if none is.

    Args:
        start: a legal schedule, within the caps or not.
        costs: of every stage.
        caps: per rank, the most it may hold.
        measures: which may be taken; what is at a partner is shifted, but never new.
        starts: how many share the work.
    """
    chance = random.Random(0)
    changes = [_shifted, _shifted, _shifted, _dropped]
    if "offload" in measures:
        changes.append(_offloaded)
    if "recompute" in measures:
        changes.append(_recomputed)
    here = _try(start, costs, caps)
    if here is None:
        return None
    best = here if here.fits else None
    actions = sum(map(len, start.ranks))
    tries = max(_FEWEST, min(_MOST, _WORK // (actions * starts)))
    hot = _HEAT * here.price
    for count in range(tries):
        rank = chance.randrange(len(here.schedule.ranks))
        row = chance.choice(changes)(here.schedule.ranks[rank], chance)
        if row is None:
            continue
        tried = _try(replace(here.schedule, ranks=_with(here.schedule, rank, row)), costs, caps)
        if tried is None:
            continue
        heat = hot * (1 - count / tries) ** 2
        worse = tried.price - here.price
        if worse <= 0 or (heat > 0 and chance.random() < math.exp(-worse / heat)):
            here = tried
        if tried.fits and (best is None or tried.price < best.price):
            best = tried
    return None if best is None else best.schedule


def _with(schedule: Schedule, rank: int, row: Row) -> tuple[Row, ...]:
    return (*schedule.ranks[:rank], row, *schedule.ranks[rank + 1 :])


def _try(schedule: Schedule, costs: Costs, caps: Sequence[float]) -> _Tried | None:
    """What a schedule costs; None if it cannot run."""
    try:
        timeline = costs.timeline(schedule)
    except ScheduleError:
        return None
    step, peaks = timeline.step_time, costs.peaks(schedule, timeline)
    over = sum(
        max(0.0, peak / cap - ROUNDING) for peak, cap in zip(peaks, caps, strict=True) if cap > 0
    )
    return _Tried(schedule, step * (1 + _PRICE * over), over == 0.0)


def _shifted(row: Row, chance: random.Random) -> Row | None:
    """An action goes elsewhere, as far as what it must not pass."""
    source = chance.randrange(len(row))
    step = chance.choice((-1, 1))
    most = chance.randint(1, _REACH)
    target = source
    while (
        0 <= target + step < len(row)
        and abs(target - source) < most
        and not _tied(row[source], row[target + step])
    ):
        target += step
    if target == source:
        return None
    left = [*row[:source], *row[source + 1 :]]
    return (*left[:target], row[source], *left[target:])


def _tied(one: Action, other: Action) -> bool:
    """Whether two actions of a rank must keep their order."""
    if one.kind in _PARTNERS and other.kind in _PARTNERS:
        return True
    if one.stage != other.stage:
        return False
    kinds = {ActionKind.BACKWARD_INPUT if a.kind in _BACKWARDS else a.kind for a in (one, other)}
    fifo = len(kinds) == 1 and kinds <= {ActionKind.FORWARD, ActionKind.BACKWARD_INPUT}
    return fifo or one.microbatch == other.microbatch


def _dropped(row: Row, chance: random.Random) -> Row | None:
    """A measure less."""
    taken = [a for a in row if a.kind in (ActionKind.OFFLOAD, ActionKind.RECOMPUTE)]
    if not taken:
        return None
    drop = chance.choice(taken)
    if drop.kind is ActionKind.RECOMPUTE:
        return tuple(action for action in row if action != drop)
    place = chance.choice([at for at, action in enumerate(row) if action == drop])
    back = row.index(replace(drop, kind=ActionKind.RELOAD), place)
    return tuple(action for at, action in enumerate(row) if at not in (place, back))


def _offloaded(row: Row, chance: random.Random) -> Row | None:
    """Something more goes to the host."""
    able = [each for each in _held(row) if each[1] > each[0] + 1]
    if not able:
        return None
    made, used = chance.choice(able)
    what = row[used]
    leaves = chance.randint(made + 1, min(made + 3, used))
    comes = chance.randint(max(leaves, used - 4), used)
    return (
        *row[:leaves],
        replace(what, kind=ActionKind.OFFLOAD),
        *row[leaves:comes],
        replace(what, kind=ActionKind.RELOAD),
        *row[comes:],
    )


def _recomputed(row: Row, chance: random.Random) -> Row | None:
    """Something more is made again."""
    able = [
        (made, used)
        for made, used in _held(row)
        if row[made].kind is ActionKind.FORWARD and row[used].kind in _BACKWARDS
    ]
    if not able:
        return None
    made, used = chance.choice(able)
    place = chance.randint(max(made + 1, used - 3), used)
    return (*row[:place], replace(row[used], kind=ActionKind.RECOMPUTE), *row[place:])


def _held(row: Row) -> Iterator[tuple[int, int]]:
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
