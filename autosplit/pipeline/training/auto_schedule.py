"""``schedule="auto"`` in a trainer: measure the first steps, then search a schedule for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.builders.placement import StageTimes
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.stages import TrainableStage, sizes, stage_memory
from autosplit.pipeline.engine.timing import measure_transfer
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.routes import pairs_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.search.search import search
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.timeline import Span, median_durations
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.text.progress import working

MEASURED = 2
"""Steps that are measured, after a first one that builds the stages."""


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
        schedule: what those steps run. What is found keeps no more than it does.
        groups: the trainer's process groups.
        feeds: who feeds whom.
        device: where the stages run.

    Attributes:
        schedule: see above.
        done: whether there is no more to be measured.
    """

    def __init__(
        self, schedule: Schedule, groups: Groups, feeds: Feeds, device: torch.device
    ) -> None:
        self.schedule = schedule
        self.done = False
        self._groups, self._feeds, self._device = groups, feeds, device
        self._steps: list[list[Span]] = []

    def after_step(
        self, spans: Sequence[Span], stages: Mapping[int, TrainableStage]
    ) -> Schedule | None:
        """Note a step; the schedule for those to come, once enough were measured.

        Collective when it is due.

        Args:
            spans: what this rank ran, in its order.
            stages: this rank's.
        """
        self._steps.append(list(spans))
        if len(self._steps) <= MEASURED:
            return None
        self.done = True
        return self._search(self._costs(stages))

    def _search(self, costs: Costs) -> Schedule:
        """What is found for these costs."""
        try:
            with working("searching a schedule for the times of the first steps"):
                return search(
                    costs,
                    self.schedule.microbatches,
                    ranks=len(self.schedule.ranks),
                    placement=self.schedule.placement,
                    # A rank that keeps nothing at all may keep nothing more.
                    cap=[max(peak, 1.0) for peak in peak_memory(self.schedule, costs.memory)],
                )
        except ScheduleError:  # no other order keeps as little: go on with this one
            return self.schedule

    def _links(self) -> Transfer:
        """The links between ranks; collective, and the same on all of them."""
        pairs = pairs_of(self.schedule, self._feeds)
        return measure_transfer(self._groups, self._device, pairs)

    def _costs(self, stages: Mapping[int, TrainableStage]) -> Costs:
        """What a step costs by what all ranks measured, or would take usually; collective."""
        links = self._links()
        own = (
            median_durations(self._steps[1:]),
            {index: stage_memory(stage) for index, stage in stages.items()},
            {index: sizes(stage) for index, stage in stages.items()},
        )
        seconds: dict[tuple[int, ActionKind], float] = {}
        kept: dict[int, StageMemory] = {}
        sent: dict[int, tuple[list[float], list[float]]] = {}
        for took, memory, put_out in self._groups.everybody.gather(own):
            # Of replicas the slowest counts: the others wait for it.
            seconds |= {key: max(each, seconds.get(key, 0.0)) for key, each in took.items()}
            kept |= memory
            sent |= put_out
        every = range(self.schedule.stages)
        usual = usual_times(self.schedule.stages)
        return Costs(
            [_times(stage, seconds) if seconds else usual[stage] for stage in every],
            [kept[stage] for stage in every],
            replace(
                links,
                message_bytes={stage: sent[stage][0] for stage in every},
                gradient_bytes={stage: sent[stage][1] for stage in every},
            ),
            wiring=self._feeds.wiring,
        )


def _times(stage: int, seconds: Mapping[tuple[int, ActionKind], float]) -> StageTimes:
    half = seconds.get((stage, ActionKind.BACKWARD), 0.0) / 2  # where no backward was split
    return (
        seconds[stage, ActionKind.FORWARD],
        seconds.get((stage, ActionKind.BACKWARD_INPUT), half),
        seconds.get((stage, ActionKind.BACKWARD_WEIGHT), half),
    )
