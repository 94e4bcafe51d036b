"""An F that comes forward, and what is too much because of it goes away: one change of rows.

Each of the two alone is dearer than neither, so single changes seldom come to both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING, changes_of, levels
from autosplit.pipeline.simulation.counted_costs import CountedCosts

from .order_changes import BACKWARDS, Change, Starts, tied, with_action, with_shift
from .row_changes import held, offloaded, sent

_MEASURES = 3  # that are taken at once, at most
_LAST = 0.7  # of the choices fall on what is used last
_PULLED = 0.8  # of the changes begin with an F


def relief(measures: Sequence[str], costs: CountedCosts, caps: Sequence[float]) -> Change:
    """The change for some measures and caps."""

    def change(schedule: Schedule, starts: Starts, chance: random.Random) -> Schedule | None:
        changed = schedule
        if chance.random() < _PULLED:
            changed = _pulled(changed, chance) or changed
        for _ in range(_MEASURES):
            over = _first_over(changed, costs, caps)
            if over is None:
                break
            relieved = _relieved(changed, starts, chance, measures, *over)
            if relieved is None:
                break
            changed = relieved
        return None if changed is schedule else changed

    return change


def early(
    schedule: Schedule, measures: Sequence[str], costs: CountedCosts, caps: Sequence[float]
) -> Schedule:
    """All Fs first, and away what is too much because of them, as far as the measures can."""
    rows = tuple(
        tuple(sorted(row, key=lambda action: action.kind is not ActionKind.FORWARD))
        for row in schedule.ranks
    )
    changed, chance = replace(schedule, ranks=rows), random.Random(0)
    for _ in range(2 * sum(map(len, rows))):
        over = _first_over(changed, costs, caps)
        if over is None:
            break
        changed = _relieved(changed, {}, chance, measures, *over) or changed
    return changed


def _pulled(schedule: Schedule, chance: random.Random) -> Schedule | None:
    """An F comes forward past some of what its rank computes."""
    rank = chance.randrange(len(schedule.ranks))
    row = schedule.ranks[rank]
    source = chance.choice([at for at, a in enumerate(row) if a.kind is ActionKind.FORWARD])
    target, passed, most = source, 0, chance.randint(1, 3)
    while target > 0 and passed < most and not tied(row[source], row[target - 1]):
        target -= 1
        passed += row[target].kind.is_compute
    if not passed:
        return None
    return with_shift(schedule, rank, source, target)


def _first_over(
    schedule: Schedule, costs: CountedCosts, caps: Sequence[float]
) -> tuple[int, int] | None:
    """A rank and the first place in its row where it holds too much."""
    costs.tally.actions += sum(map(len, schedule.ranks)) // 4  # as for peaks
    changes = changes_of(schedule, costs.memory)
    for rank, row in enumerate(schedule.ranks):
        for place, level in enumerate(levels(row, changes[rank])):
            if level > caps[rank] * ROUNDING:
                return rank, place
    return None


def _relieved(
    schedule: Schedule,
    starts: Starts,
    chance: random.Random,
    measures: Sequence[str],
    rank: int,
    place: int,
) -> Schedule | None:
    """Something that a rank holds at a place without need goes away before it."""
    row = schedule.ranks[rank]
    able = [each for each in held(row) if each[0] < place < each[1]]
    if not able:
        return None
    made, used = chance.choice(able)
    if chance.random() < _LAST:
        made, used = max(able, key=lambda each: each[1])
    measure = chance.choice(measures)
    if measure == "recompute":
        if row[made].kind is not ActionKind.FORWARD or row[used].kind not in BACKWARDS:
            return None
        again = replace(row[used], kind=ActionKind.RECOMPUTE)
        return with_action(schedule, rank, used, again)
    leaves = chance.randint(made + 1, min(made + 2, place))
    comes = chance.randint(max(place + 1, used - 2), used)
    if measure == "balance":
        waits = chance.random() < 0.5
        return sent(schedule, starts, chance, (rank, leaves, comes, row[used]), waits=waits)
    return offloaded(schedule, (rank, leaves, comes, row[used]), wait=place)
