"""All schedules for one pipeline, simulated side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autosplit.errors import ScheduleError
from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.memory import StageMemory, peak_memory
from autosplit.pipeline.schedule import Schedule
from autosplit.pipeline.schedules import SCHEDULES, build
from autosplit.pipeline.schedules.fill import StageTimes
from autosplit.pipeline.simulate import simulate
from autosplit.pipeline.timeline import Timeline
from autosplit.pipeline.transfer import Transfer


@dataclass(frozen=True)
class Pipeline:
    """What schedules are compared on.

    Attributes:
        times: per rank, seconds of F, I and W of its part of the model.
        memory: per rank, what its part keeps of a microbatch.
        transfer: the links between ranks.
    """

    times: tuple[StageTimes, ...]
    memory: tuple[StageMemory, ...]
    transfer: Transfer

    def cut(self, chunks: int) -> Pipeline:
        """The same with each part of the model cut into ``chunks`` equal stages."""
        return Pipeline(
            tuple(
                (f / chunks, i / chunks, w / chunks)
                for f, i, w in self.times
                for _ in range(chunks)
            ),
            tuple(
                StageMemory(each.saved / chunks, each.deferred / chunks)
                for each in self.memory
                for _ in range(chunks)
            ),
            self.transfer,
        )

    def seconds(self, action: Action) -> float:
        """How long ``action`` takes."""
        forward, inputs, weights = self.times[action.stage]
        if action.kind is ActionKind.FORWARD:
            return forward
        if action.kind is ActionKind.BACKWARD_INPUT:
            return inputs
        return weights if action.kind is ActionKind.BACKWARD_WEIGHT else inputs + weights


@dataclass(frozen=True)
class Entry:
    """One schedule of a survey.

    ``weights`` is the placement of W, or ``"fused"``; ``peaks`` is the most each rank keeps.
    """

    name: str
    weights: str
    schedule: Schedule
    timeline: Timeline
    peaks: tuple[float, ...]


@dataclass(frozen=True)
class Survey:
    """The schedules that a pipeline admits, and why it does not admit the others, by name."""

    entries: tuple[Entry, ...]
    refused: dict[str, str]


def survey(pipeline: Pipeline, microbatches: int, *, chunks: int = 2) -> Survey:
    """Simulate every schedule in every form.

    Args:
        pipeline: one part of the model a rank; where a schedule has several stages a rank, each
            part is cut into as many equal stages.
        microbatches: M >= 1.
        chunks: stages a rank where the schedule leaves that open.

    Raises:
        ScheduleError: a bad count, or times and memory of different numbers of ranks.
    """
    if len(pipeline.times) != len(pipeline.memory) or chunks < 2:
        raise ScheduleError(
            f"expected times and memory of the same number of ranks and chunks >= 2, got "
            f"{len(pipeline.times)}, {len(pipeline.memory)} and {chunks}"
        )
    entries: list[Entry] = []
    refused: dict[str, str] = {}
    for name, family in SCHEDULES.items():
        parts = family.chunks or chunks
        try:
            entries += _forms(name, pipeline.cut(parts), microbatches, len(pipeline.times))
        except ScheduleError as error:
            refused[name] = str(error)
    if not entries:
        raise ScheduleError(next(iter(refused.values())))
    return Survey(tuple(entries), refused)


def _forms(name: str, pipeline: Pipeline, microbatches: int, ranks: int) -> Iterator[Entry]:
    """The schedule fused, if it can be, and with each placement of W that it admits."""
    family = SCHEDULES[name]
    for weights in (*(["fused"] if family.fused else []), *(family.weights or ("own",))):
        schedule = build(
            name,
            len(pipeline.times),
            microbatches,
            ranks=ranks,
            split_backward=weights != "fused",
            weights=weights if weights in family.weights else None,
            times=pipeline.times if weights == "fill" else None,
        )
        timeline = simulate(schedule, pipeline.seconds, transfer=pipeline.transfer)
        peaks = tuple(peak_memory(schedule, pipeline.memory))
        yield Entry(name, weights, schedule, timeline, peaks)
