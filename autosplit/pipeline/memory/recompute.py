"""Activations made again from a stage's inputs, in waits where there are any.

The F of such a microbatch keeps its inputs only. A RECOMPUTE stands before the backward that needs
the rest: not in it, so that it can run while the rank waits for the gradients, and what it makes
serves I and W alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING
from autosplit.pipeline.simulation.step_costs import Costs

from .bounds import bounds_of, rank_by_rank, refuse_excess
from .occupancy import Held, Occupancy

_LOOK_BACK = (0, 2, 5)  # compute actions before the backward among which a wait is looked for


def recompute(schedule: Schedule, costs: Costs, limit: float | Sequence[float]) -> Schedule:
    """The schedule in which no rank holds more than ``limit``, with what is beyond made again.

    Args:
        schedule: a legal one.
        costs: of every stage, the inputs that its F keeps with them.
        limit: the most a rank may hold of its microbatches at once, in the unit of
            ``costs.memory``: one number, or one for each rank.

    Raises:
        ScheduleError: the limit cannot be kept; says what could.
    """
    bounds = bounds_of(limit, len(schedule.ranks))
    found = nearest(schedule, costs, bounds)
    refuse_excess("recomputing", found, costs, bounds)
    return found


def nearest(schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> Schedule:
    """The schedule that recomputes until bounds are kept, or that comes as near as it can."""
    return rank_by_rank(schedule, costs, bounds, partial(_recomputed, costs))


def _recomputed(
    costs: Costs, schedule: Schedule, there: Occupancy, bound: float
) -> Iterator[Schedule]:
    """With what is beyond the bound made again, in waits that are looked for near and far."""
    for look_back in _LOOK_BACK:
        yield _with(schedule, there, _choose(there, bound, costs, look_back))


def _choose(there: Occupancy, bound: float, costs: Costs, look_back: int) -> list[tuple[int, Held]]:
    """What is made again, each with the slot before which that is done."""
    level = [*there.level]
    waits = [there.waits(slot) for slot in range(len(level))]
    left = {
        held: True
        for held in there.held
        if not held.deferred
        and there.kinds[held.made] is ActionKind.FORWARD
        and held.size > costs.memory[held.stage].inputs
    }
    chosen: list[tuple[int, Held]] = []
    for slot in range(len(level)):
        while level[slot] > bound * ROUNDING:
            able = [held for held in left if held.made < slot < held.used]
            if not able:
                break
            places = {held: _place(held, slot, waits, look_back) for held in able}
            prices = {
                held: (max(0.0, costs.times[held.stage][0] - waits[at]), -held.used)
                for held, at in places.items()
            }
            held = min(able, key=prices.__getitem__)
            at = places[held]
            del left[held]
            chosen.append((at, held))
            waits[at] = max(0.0, waits[at] - costs.times[held.stage][0])
            for each in range(held.made + 1, at):
                level[each] -= held.size - costs.memory[held.stage].inputs
    return chosen


def _place(held: Held, slot: int, waits: Sequence[float], look_back: int) -> int:
    """Before which slot it is made again: the longest wait near its use, the last of like ones."""
    first = max(slot + 1, held.used - look_back)
    return max(range(first, held.used + 1), key=lambda at: (waits[at], at))


def _with(schedule: Schedule, there: Occupancy, chosen: Sequence[tuple[int, Held]]) -> Schedule:
    row, begin = schedule.ranks[there.rank], 0
    changed: list[Action] = []
    for slot, end in enumerate([*there.places, len(schedule.ranks[there.rank])]):
        changed += row[begin:end]
        changed += (
            Action(held.stage, ActionKind.RECOMPUTE, held.microbatch)
            for at, held in chosen
            if at == slot
        )
        begin = end
    rows = [tuple(changed) if r == there.rank else each for r, each in enumerate(schedule.ranks)]
    return replace(schedule, ranks=tuple(rows))
