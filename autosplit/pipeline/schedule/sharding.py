"""Where a schedule gathers and frees sharded parameters: UNSHARD and RESHARD of a stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from .action import Action, ActionKind
from .schedule import Schedule


def with_sharding(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """The schedule, in which each stage is gathered before its first action of a step and freed
    behind its last: parameters are sharded between steps, and whole within one (ZeRO-2).

    A stage that the schedule gathers already stays as it is.

    Args:
        schedule: any.
        stages: those that are sharded; None: all.
    """
    given = {a.stage for row in schedule.ranks for a in row if a.kind.is_sharding}
    wanted = set(range(schedule.stages) if stages is None else stages) - given
    if not wanted:
        return schedule
    return replace(schedule, ranks=tuple(tuple(_placed(row, wanted)) for row in schedule.ranks))


def without_sharding(schedule: Schedule) -> Schedule:
    """The schedule without UNSHARD and RESHARD."""
    rows = tuple(tuple(a for a in row if not a.kind.is_sharding) for row in schedule.ranks)
    return schedule if rows == schedule.ranks else replace(schedule, ranks=rows)


def _placed(row: Sequence[Action], stages: Collection[int]) -> Iterator[Action]:
    last = {action.stage: place for place, action in enumerate(row) if action.kind.is_compute}
    gathered: set[int] = set()
    for place, action in enumerate(row):
        stage = action.stage
        if stage in stages and action.kind.is_compute and stage not in gathered:
            gathered.add(stage)
            yield Action(stage, ActionKind.UNSHARD, 0)
        yield action
        if stage in gathered and last[stage] == place:
            yield Action(stage, ActionKind.RESHARD, 0)
