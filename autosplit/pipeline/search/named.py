"""The named schedules that a search begins from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, build, placement_of
from autosplit.pipeline.builders.placement import StageTimes
from autosplit.pipeline.schedule.schedule import Schedule


def named_schedules(
    times: Sequence[StageTimes],
    microbatches: int,
    ranks: int,
    placement: Sequence[int] | None = None,
) -> Iterator[Schedule]:
    """Every named schedule with one copy of the stages, in every form, without crossing steps.

    Args:
        times: per stage, seconds of F, I and W.
        microbatches: M.
        ranks: number of processes.
        placement: the rank of every stage, of which the others are not built; None: any.
    """
    for name, family in SCHEDULES.items():
        if family.copies > 1 or not _places(name, len(times), microbatches, ranks, placement):
            continue
        for weights in (*(["fused"] if family.fused else []), *(family.weights or (None,))):
            try:
                schedule = build(
                    name,
                    len(times),
                    microbatches,
                    ranks=ranks,
                    split_backward=weights != "fused",
                    weights=None if weights == "fused" else weights,
                    times=times if weights == "fill" else None,
                )
            except ScheduleError:
                continue
            yield replace(schedule, crosses_step=False)


def _places(
    name: str, stages: int, microbatches: int, ranks: int, placement: Sequence[int] | None
) -> bool:
    """Whether a schedule puts the stages there."""
    if placement is None:
        return True
    try:
        return placement_of(name, stages, microbatches, ranks) == tuple(placement)
    except ScheduleError:
        return False
