"""``schedule="auto"`` in a trainer: measure the first steps, then search a schedule for them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.action import ActionKind
from autosplit.pipeline.costs import Costs
from autosplit.pipeline.fusing import fuse_adjacent
from autosplit.pipeline.groups import Groups
from autosplit.pipeline.memory import StageMemory, peak_memory
from autosplit.pipeline.schedule import Schedule
from autosplit.pipeline.schedules import build
from autosplit.pipeline.schedules.fill import StageTimes
from autosplit.pipeline.search import search
from autosplit.pipeline.timeline import Span

MEASURED = 2
"""Steps that are measured, after a first one that builds the stages."""

Memory = tuple[float, float]
"""Bytes that a stage keeps of a microbatch from F to I, and from I to W."""


def usual_times(stages: int) -> list[StageTimes]:
    """F = I = W, but the first stage's inputs are data: it has no I, and W is all its backward."""
    return [(1.0, 0.0, 2.0), *[(1.0, 1.0, 1.0)] * (stages - 1)]


def first_schedule(stages: int, microbatches: int, ranks: int) -> Schedule:
    """What runs while the trainer measures; the search keeps its placement and its memory."""
    chunks, rest = divmod(stages, ranks)
    name = "1f1b"
    if not rest and chunks > 1:
        name = "zb-v" if chunks == 2 else "interleaved"
    times = usual_times(stages)
    return replace(build(name, stages, microbatches, ranks=ranks, times=times), crosses_step=False)


class Tuner:
    """Collects what the first steps took; every rank comes to the same schedule.

    Args:
        schedule: what those steps run.
        groups: the trainer's process groups.
    """

    def __init__(self, schedule: Schedule, groups: Groups) -> None:
        self._schedule = schedule
        self._groups = groups
        self._steps: list[list[Span]] = []

    def after_step(self, spans: Sequence[Span], memory: Mapping[int, Memory]) -> Schedule | None:
        """Note a step; the schedule for those to come, once enough were measured.

        It keeps no more on any rank than the steps that were measured. Collective when it is due.

        Args:
            spans: what this rank ran, in its order.
            memory: of this rank's stages.
        """
        self._steps.append(list(spans))
        if len(self._steps) <= MEASURED:
            return None
        rows = self._groups.gather((_times(self._steps[1:]), dict(memory)))
        times = {stage: each for found, _ in rows for stage, each in found.items()}
        kept = {stage: each for _, found in rows for stage, each in found.items()}
        stages = range(self._schedule.stages)
        costs = Costs(
            [times[stage] for stage in stages], [StageMemory(*kept[stage]) for stage in stages]
        )
        try:
            found = search(
                costs,
                self._schedule.microbatches,
                ranks=len(self._schedule.ranks),
                placement=self._schedule.placement,
                # A rank that keeps nothing at all may keep nothing more.
                cap=[max(peak, 1.0) for peak in peak_memory(self._schedule, costs.memory)],
            )
            return fuse_adjacent(found, costs.seconds)
        except ScheduleError:  # no other order keeps as little: go on with this one
            return self._schedule


def _times(steps: Iterable[Sequence[Span]]) -> dict[int, StageTimes]:
    """Median seconds of F, I and W of each stage."""
    found: dict[int, dict[ActionKind, list[float]]] = defaultdict(lambda: defaultdict(list))
    for spans in steps:
        for span in spans:
            found[span.action.stage][span.action.kind].append(span.end - span.start)
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    medians = {
        stage: [statistics.median(times[kind]) for kind in kinds] for stage, times in found.items()
    }
    return {stage: (f, i, w) for stage, (f, i, w) in medians.items()}
