"""The named schedules that a search begins from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.builders.placement.fill import StageTimes
from autosplit.pipeline.schedule.schedule import Schedule


def named_schedules(
    times: Sequence[StageTimes], microbatches: int, ranks: int
) -> Iterator[Schedule]:
    """Every named schedule with one copy of the stages, in every form, without crossing steps.

    Args:
        times: per stage, seconds of F, I and W.
        microbatches: M.
        ranks: number of processes.
    """
    for name, family in SCHEDULES.items():
        if family.copies > 1:
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
