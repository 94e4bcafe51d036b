"""Moves put into schedules by the clock of a simulated step, as many as there can be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.validation.validate import validate

Away = tuple[str, str]
SAVED: Away = ("F", "IB")
DEFERRED: Away = ("I", "W")
_PARTNERS = {ActionKind.EVICT: ActionKind.ACCEPT, ActionKind.LOAD: ActionKind.RETURN}


def offloading(schedule: Schedule, away: Iterable[Away] = (SAVED, DEFERRED)) -> Schedule:
    """Every microbatch of which nothing else is needed meanwhile is offloaded."""
    rows = []
    for row in schedule.ranks:
        moves = list(_moves(row, away, (ActionKind.OFFLOAD, ActionKind.RELOAD)))
        rows.append(_inserted(row, moves))
    return _legal(replace(schedule, name=f"{schedule.name}, offloaded", ranks=tuple(rows)))


def evicting(
    schedule: Schedule, ranks: Iterable[int] = (0,), away: Iterable[Away] = (SAVED, DEFERRED)
) -> Schedule:
    """Likewise evicted, from these ranks."""
    count = len(schedule.ranks)
    spans = simulate(schedule, lambda action: 1.0).spans
    starts = [sorted(s.start for s in spans if s.rank == rank) for rank in range(count)]
    moves: list[list[tuple[float, Action]]] = [[] for _ in range(count)]
    kinds = ActionKind.EVICT, ActionKind.LOAD
    timed = [
        (starts[rank][place], rank, place, action)
        for rank in ranks
        for place, action in _moves(schedule.ranks[rank], away, kinds)
    ]
    timed.sort(key=lambda item: item[0])
    for time, rank, place, action in timed:
        other = replace(action, kind=_PARTNERS[action.kind])
        moves[rank].append((place, action))
        partner = schedule.partner(rank)
        moves[partner].append((sum(start < time for start in starts[partner]), other))
    rows = [_inserted(row, mine) for row, mine in zip(schedule.ranks, moves, strict=True)]
    name = f"{schedule.name}, evicted"
    return _legal(replace(schedule, name=name, ranks=tuple(rows)))


def awaiting(schedule: Schedule) -> Schedule:
    """Whoever sends something away waits until it has left."""
    rows = []
    for row in schedule.ranks:
        awaited: list[Action] = []
        for action in row:
            awaited.append(action)
            if action.kind in (ActionKind.OFFLOAD, ActionKind.EVICT):
                awaited.append(replace(action, kind=ActionKind.AWAIT))
        rows.append(tuple(awaited))
    return _legal(replace(schedule, name=f"{schedule.name}, awaited", ranks=tuple(rows)))


def recomputing(schedule: Schedule) -> Schedule:
    """Every forward is run again just before its backward."""
    rows = []
    for row in schedule.ranks:
        again = [
            (place, replace(action, kind=ActionKind.RECOMPUTE))
            for place, action in enumerate(row)
            if action.kind.value in "IB"
        ]
        rows.append(_inserted(row, again))
    return _legal(replace(schedule, name=f"{schedule.name}, recomputed", ranks=tuple(rows)))


def _moves(
    row: tuple[Action, ...], away: Iterable[Away], kinds: tuple[ActionKind, ActionKind]
) -> list[tuple[int, Action]]:
    """Places of moves, each one action ahead of the action that needs the tensors."""
    results = []
    for first, second in away:
        for start, action in enumerate(row):
            if action.kind.value != first:
                continue
            mine = (action.stage, action.microbatch)
            ends = (
                place
                for place, item in enumerate(row)
                if (item.stage, item.microbatch) == mine and item.kind.value in second
            )
            end = next(ends, None)
            if end is not None and end > start + 2:
                results.append((start + 1, replace(action, kind=kinds[0])))
                results.append((end - 1, replace(action, kind=kinds[1])))
    return sorted(results, key=lambda item: item[0])


def _inserted(row: tuple[Action, ...], moves: Iterable[tuple[float, Action]]) -> tuple[Action, ...]:
    places = [(float(place), 1, 0, action) for place, action in enumerate(row)]
    places += [(place, 0, at, action) for at, (place, action) in enumerate(moves)]
    return tuple(action for *_, action in sorted(places, key=lambda item: item[:3]))


def _legal(schedule: Schedule) -> Schedule:
    validate(schedule)
    return schedule
