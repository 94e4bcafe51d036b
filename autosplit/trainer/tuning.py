"""The schedule that a trainer finds for itself: for ``schedule="auto"`` by the times of its first
steps, for ``memory_limit`` the shortest step in which no rank holds more than that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosplit.errors import PipelineError, ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.builders.placement import StageTimes
from autosplit.pipeline.engine.stage_memory import stage_memory
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.search.search import search
from autosplit.pipeline.search.within_memory import LimitError, search_within
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs, Span, median_durations
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.ranks.groups import Groups
from autosplit.text.progress import working
from autosplit.trainer.rank_memory import RankMemory

MEASURED = 2
"""Steps that are measured, after a first one that builds the stages."""
_TRIES = 6  # searches, each with what the schedule before it turned out to hold beside


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
    """Collects what the first steps took, and searches a schedule for them; with a limit also
    before the first step, for usual times. Every rank comes to the same schedule.

    A search knows microbatches by their sizes. What a rank holds beside them is known of a schedule
    that was found, by playing it with all storages: within a limit, the next search leaves so much
    room on each rank.

    Args:
        schedule: what those steps run, whose placement is kept. Without a limit, what is found
            keeps no more than it does.
        groups: the trainer's process groups.
        dataflow: the dataflow between stages.
        size: tells this rank's bytes.
        limit: bytes that a rank may hold, if there is one.

    Attributes:
        limit: see above.
    """

    def __init__(
        self,
        schedule: Schedule,
        groups: Groups,
        dataflow: StageDataflow,
        size: RankMemory,
        limit: int | None,
    ) -> None:
        self._schedule = self._running = schedule
        self._groups, self._dataflow = groups, dataflow
        self._size, self.limit = size, limit
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
        return self.found(stages) if len(self._steps) > MEASURED else None

    def found(self, stages: Mapping[int, TrainableStage]) -> Schedule:
        """The shortest step for what stages took so far, or take usually; collective.

        Raises:
            PipelineError: nothing keeps the limit; says the least that would do and of what.
        """
        costs = self._costs(stages)
        if self.limit is not None:
            with working(f"searching a schedule that keeps {self.limit:,} bytes"):
                self._running = self._shortest(costs, self.limit)
            return self._running
        try:
            with working("searching a schedule for the times of the first steps"):
                return search(
                    costs,
                    self._schedule.microbatches,
                    ranks=len(self._schedule.ranks),
                    placement=self._schedule.placement,
                    # A rank that keeps nothing at all may keep nothing more.
                    cap=[max(peak, 1.0) for peak in peak_memory(self._schedule, costs.memory)],
                )
        except ScheduleError:  # no other order keeps as little: go on with this one
            return self._schedule

    def _shortest(self, costs: Costs, limit: int) -> Schedule:
        fixed = self._most(self._size.fixed_bytes() + self._size.batch_bytes)
        beside = [0.0] * len(fixed)
        for _ in range(_TRIES):
            found = self._within(costs, limit, fixed, beside)
            held = self._held(found, costs)
            if max(held) <= limit:
                return found
            kept = peak_memory(found, costs.memory)
            room = zip(beside, held, fixed, kept, strict=True)
            more = [max(known, all_ - rest - own) for known, all_, rest, own in room]
            if more == beside:
                break
            beside = more
        # The search may miss what is known to fit, or what a refusal advised a limit for: what it
        # offers for a limit that nothing keeps, the same whatever the limit is.
        there = [self._running, self._schedule, self._within(costs, 1, fixed, [0.0] * len(fixed))]
        pairs = [(self._held(each, costs), each) for each in there]
        held, found = min(pairs, key=lambda pair: max(pair[0]))
        least = max(held)
        if least <= limit:
            return found
        rank = held.index(least)
        kept_there = least - fixed[rank]
        advice = (
            "use more ranks, or an optimizer that keeps less"
            if fixed[rank] > kept_there
            else "cut the batch into more and smaller microbatches"
        )
        raise PipelineError(
            f"memory_limit: nothing was found that keeps {limit:,} bytes; the least that was "
            f"needs memory_limit={least}, where rank {rank} holds {fixed[rank]:,} bytes of "
            f"parameters, gradients, optimizer state and batch, and {kept_there:,} of microbatches "
            f"and messages. Use that limit, or {advice}"
        )

    def _held(self, schedule: Schedule, costs: Costs) -> list[int]:
        """Per rank, the most that it will hold, by graphs and messages; collective."""
        levels = self._size.levels(schedule)
        played = peak_memory(schedule, costs.memory)[self._groups.rank]
        if levels is not None:
            played = max(levels, default=0)
        return self._most(self._size.fixed_bytes() + self._size.batch_bytes + math.ceil(played))

    def _most(self, own: int) -> list[int]:
        """Per rank of the pipeline the greatest number of all replicas; collective."""
        heard = self._groups.everybody.gather(own)
        return [max(heard[at] for at in ranks) for ranks in self._groups.layout.columns]

    def _within(
        self, costs: Costs, limit: float, fixed: Sequence[float], beside: Sequence[float]
    ) -> Schedule:
        """What is found within some bytes beside what a rank holds anyway, or the nearest to it."""
        schedule = self._schedule
        try:
            found: Schedule | None = search_within(
                costs,
                schedule.microbatches,
                limit,
                ranks=len(schedule.ranks),
                placement=schedule.placement,
                fixed=[*map(sum, zip(fixed, beside, strict=True))],
            )
        except LimitError as error:
            found = error.schedule
        return replace(found or schedule, crosses_step=False)

    def _costs(self, stages: Mapping[int, TrainableStage]) -> Costs:
        """What a step costs by what all ranks measured, or would take usually; collective. Messages
        cost nothing, which hardly ever changes the order; what is moved goes as to the store.
        """
        links = Transfer()
        if self.limit is not None:
            host = self._size.host_link()
            links = Transfer(host.latency, host.bandwidth, host=host)
        own = (
            median_durations(self._steps[1:]),
            {index: stage_memory(stage) for index, stage in stages.items()},
        )
        seconds: dict[tuple[int, ActionKind], float] = {}
        kept: dict[int, StageMemory] = {}
        for took, memory in self._groups.everybody.gather(own):
            # Of replicas the slowest counts: the others wait for it.
            seconds |= {key: max(each, seconds.get(key, 0.0)) for key, each in took.items()}
            kept |= memory
        every = range(self._schedule.stages)
        usual = usual_times(self._schedule.stages)
        return Costs(
            [_times(stage, seconds) if seconds else usual[stage] for stage in every],
            [kept[stage] for stage in every],
            links,
            wiring=self._dataflow.wiring,
        )


def _times(stage: int, seconds: Mapping[tuple[int, ActionKind], float]) -> StageTimes:
    half = seconds.get((stage, ActionKind.BACKWARD), 0.0) / 2  # where no backward was split
    return (
        seconds[stage, ActionKind.FORWARD],
        seconds.get((stage, ActionKind.BACKWARD_INPUT), half),
        seconds.get((stage, ActionKind.BACKWARD_WEIGHT), half),
    )
