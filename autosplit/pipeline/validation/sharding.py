"""Whether a schedule gathers sharded parameters before it reads them."""

from __future__ import annotations

from collections.abc import Iterator

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule

from .grid import Cell

Found = tuple[str, Cell]


def sharding_faults(schedule: Schedule) -> Iterator[Found]:
    """Whatever is wrong with UNSHARD and RESHARD, of the stages in whose rows they are."""
    for rank, row in enumerate(schedule.ranks):
        named = {action.stage for action in row if action.kind.is_sharding}
        gathered: set[int] = set()
        for place, action in enumerate(row):
            fault = _fault(action, gathered) if action.stage in named else ""
            if fault:
                yield f"{action} on rank {rank} {fault}", (rank, place)
            if action.kind is ActionKind.UNSHARD:
                gathered.add(action.stage)
            elif action.kind is ActionKind.RESHARD:
                gathered.discard(action.stage)


def _fault(action: Action, gathered: set[int]) -> str:
    there = action.stage in gathered
    if action.kind is ActionKind.UNSHARD and there:
        return "gathers parameters that are gathered already: RESHARD comes before"
    if action.kind is ActionKind.RESHARD and not there:
        return "frees parameters that are not gathered: UNSHARD comes before"
    # A W may: that of a first stage is its whole backward.
    if action.kind.is_compute and not there:
        return f"reads parameters that are sharded: {action.stage}UNSHARD comes before"
    return ""
