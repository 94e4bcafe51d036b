"""Search for a trainer's schedule: for measured times, or within a memory limit.

schedule="auto"   measure steps 2 and 3, then search the shortest step for their times
memory_limit=     search for usual times before step 1, and for measured times after step 3
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosplit.errors import PipelineError, ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.builders.placement import StageTimes
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.ledger.prediction import stage_memory
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.search.search import search
from autosplit.pipeline.search.within_memory import LimitError, search_within
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.collectives import StageCollectives
from autosplit.pipeline.simulation.simulate import Costs, Span, median_durations
from autosplit.pipeline.simulation.size_costs import Terms, fit_terms
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.ranks.groups import Groups
from autosplit.text.progress import working
from autosplit.trainer.rank_memory import RankMemory
from autosplit.trainer.rank_model import RankModel

MEASURED = 2
"""The number of measured steps, after a first step that builds the stages."""
_TRIES = 6  # searches, each with the further bytes that the previous schedule needs


def usual_times(stages: int) -> list[StageTimes]:
    """Return the times (F, I, W) of each stage before any are measured: (1, 1, 1), and (1, 0, 2)
    for the first stage, whose inputs are data.
    """
    return [(1.0, 0.0, 2.0), *[(1.0, 1.0, 1.0)] * (stages - 1)]


def first_schedule(stages: int, microbatches: int, ranks: int) -> Schedule:
    """The schedule of the measured steps, whose placement and memory the search keeps."""
    chunks, rest = divmod(stages, ranks)
    name = "1f1b"
    if not rest and chunks > 1:
        name = "zb-v" if chunks == 2 else "interleaved"
    times = usual_times(stages)
    return replace(build(name, stages, microbatches, ranks=ranks, times=times), crosses_step=False)


class Tuner:
    """Measures the first steps, and searches a schedule for their times. With a memory limit it
    also searches before the first step, for usual times. Every rank gets the same schedule.

    A search counts the bytes of microbatches. Other bytes of a rank, such as messages, are known
    only for a complete schedule. So within a limit each search reserves, on each rank, the other
    bytes of the schedule that the previous search returned.

    Args:
        schedule: the schedule of the measured steps, whose placement is kept. Without a limit, the
            new schedule keeps no more memory than the measured one.
        groups: the trainer's process groups.
        dataflow: the dataflow between stages.
        memory: the memory of this rank.
        model: this rank's modules, whose collectives are measured.
        limits: the most bytes that each rank may hold; empty: no limit.

    Attributes:
        terms: by stage and kind of action, the measured seconds as a function of a microbatch's
            size; empty until a search for measured times.
        memory: per stage, the bytes of the largest microbatch; empty until a search within limits.
        caps: per rank, the most bytes of microbatches within the limits, beside all other bytes of
            the schedule that was found; empty without limits.
    """

    def __init__(
        self,
        schedule: Schedule,
        groups: Groups,
        dataflow: StageDataflow,
        memory: RankMemory,
        model: RankModel,
        limits: Sequence[int],
    ) -> None:
        self._schedule = self._running = schedule
        self._groups, self._dataflow, self._model = groups, dataflow, model
        self._memory, self._limits = memory, limits
        self._steps: list[list[Span]] = []
        self._points = defaultdict[tuple[int, ActionKind], list[tuple[float, float]]](list)
        self.terms: dict[tuple[int, ActionKind], Terms] = {}
        self.memory: Sequence[StageMemory] = ()
        self.caps: Sequence[float] = ()

    def after_step(
        self,
        spans: Sequence[Span],
        stages: Mapping[int, TrainableStage],
        elements: Sequence[int],
    ) -> Schedule | None:
        """Record a step; collective once enough steps are measured.

        Args:
            spans: the times of this rank's actions, in order.
            stages: this rank's stages.
            elements: the size of each microbatch.

        Returns:
            The schedule for the next steps; None while more steps are to be measured.
        """
        if self._steps:  # the first step builds the stages
            for span in spans:
                size = max(elements[span.action.microbatch], 1)
                point = float(size), span.end - span.start
                self._points[span.action.stage, span.action.kind].append(point)
        self._steps.append(list(spans))
        return self.search_schedule(stages) if len(self._steps) > MEASURED else None

    def search_schedule(self, stages: Mapping[int, TrainableStage]) -> Schedule:
        """Search the schedule with the shortest step, for measured or usual times; collective.

        Raises:
            PipelineError: no schedule within the limit was found. The message has the smallest
                limit for which a schedule was found, and the bytes of the rank that needs that
                limit.
        """
        costs = self._costs(stages)
        if self._limits:
            with working(f"searching a schedule within {_limit_text(self._limits)} bytes"):
                self._running = self._shortest(costs, self._limits)
            return self._running
        try:
            with working("searching a schedule for the times of the first steps"):
                return search(
                    costs,
                    self._schedule.microbatches,
                    ranks=len(self._schedule.ranks),
                    placement=self._schedule.placement,
                    # A limit of zero bytes is not valid.
                    cap=[max(peak, 1.0) for peak in peak_memory(self._schedule, costs.memory)],
                )
        except ScheduleError:  # no other order keeps as little memory
            return self._schedule

    def _shortest(self, costs: Costs, limits: Sequence[int]) -> Schedule:
        def excess(peaks: Sequence[int]) -> int:
            return max(peak - limit for peak, limit in zip(peaks, limits, strict=True))

        fixed = self._maxima(self._memory.fixed_bytes() + self._memory.batch_bytes)
        reserved = [0.0] * len(fixed)
        for _ in range(_TRIES):
            schedule = self._search_within(costs, limits, fixed, reserved)
            peaks = self._peaks(schedule, costs)
            if excess(peaks) <= 0:
                return self._within(schedule, peaks, costs)
            kept = peak_memory(schedule, costs.memory)
            further = [peaks[rank] - fixed[rank] - kept[rank] for rank in range(len(fixed))]
            larger = [*map(max, reserved, further)]
            if larger == reserved:
                break
            reserved = larger
        # The search may miss a schedule that is known to fit, or that of the least limit, which
        # an earlier error may have advised; that one does not depend on the limit.
        frugal = self._search_within(costs, 1, fixed, [0.0] * len(fixed))
        candidates = [self._running, self._schedule, frugal]
        pairs = [(self._peaks(candidate, costs), candidate) for candidate in candidates]
        peaks, schedule = min(pairs, key=lambda pair: excess(pair[0]))
        most = excess(peaks)
        if most <= 0:
            return self._within(schedule, peaks, costs)
        rank = next(at for at, peak in enumerate(peaks) if peak - limits[at] == most)
        needed = [*map(max, peaks, limits)]
        least = str(max(peaks) if len({*limits}) == 1 else needed)
        microbatches = peaks[rank] - fixed[rank]
        advice = (
            "use more ranks, or an optimizer with less state"
            if fixed[rank] > microbatches
            else "cut the batch into more and smaller microbatches"
        )
        raise PipelineError(
            f"memory_limit: no schedule was found within {_limit_text(limits)} bytes; the most "
            f"frugal schedule needs memory_limit={least}: on rank {rank} {fixed[rank]:,} bytes of "
            f"parameters, gradients, optimizer state and batch, and {microbatches:,} bytes of "
            f"microbatches and messages. Use that limit, or {advice}"
        )

    def _within(self, schedule: Schedule, peaks: Sequence[int], costs: Costs) -> Schedule:
        """Return a schedule that keeps the limits, after setting ``caps`` and ``memory`` for it."""
        kept = peak_memory(schedule, costs.memory)
        rows = zip(self._limits, peaks, kept, strict=True)
        self.caps = [limit - peak + level for limit, peak, level in rows]
        self.memory = costs.memory
        return schedule

    def _peaks(self, schedule: Schedule, costs: Costs) -> list[int]:
        """Predict the peak memory of each rank in bytes; collective. The prediction uses graphs and
        messages if all stages have graphs, else the costs of stages.
        """
        levels = self._memory.levels(schedule)
        peak = peak_memory(schedule, costs.memory)[self._groups.rank]
        if levels is not None:
            peak = max(levels, default=0)
        return self._maxima(self._memory.fixed_bytes() + self._memory.batch_bytes + math.ceil(peak))

    def _maxima(self, number: int) -> list[int]:
        """For each rank of the pipeline, the largest ``number`` over all replicas; collective."""
        gathered = self._groups.everybody.gather(number)
        return [max(gathered[rank] for rank in ranks) for ranks in self._groups.layout.columns]

    def _search_within(
        self,
        costs: Costs,
        limit: float | Sequence[float],
        fixed: Sequence[float],
        reserved: Sequence[float],
    ) -> Schedule:
        """The shortest schedule that the search finds within the limit; if none, the schedule
        closest to the limit.
        """
        schedule = self._schedule
        try:
            result: Schedule | None = search_within(
                costs,
                schedule.microbatches,
                limit,
                ranks=len(schedule.ranks),
                placement=schedule.placement,
                fixed=[*map(sum, zip(fixed, reserved, strict=True))],
            )
        except LimitError as error:
            result = error.schedule
        return replace(result or schedule, crosses_step=False)

    def _costs(self, stages: Mapping[int, TrainableStage]) -> Costs:
        """The costs of a step, from the measured times of all ranks or from usual times;
        collective.

        Messages take no time in these costs, because their time hardly ever changes the order of
        actions. A move to a partner takes as long as a move to the offload target.
        """
        links = Transfer()
        if self._limits:
            host = self._memory.host_link()
            links = Transfer(host.latency, host.bandwidth, host=host)
        measured = (
            median_durations(self._steps[1:]),
            {index: stage_memory(stage) for index, stage in stages.items()},
            {key: fit_terms(points) for key, points in self._points.items()},
            self._model.collectives() if self._steps else {},
        )
        seconds: dict[tuple[int, ActionKind], float] = {}
        kept: dict[int, StageMemory] = {}
        collectives: dict[int, StageCollectives] = {}
        for times, memory, terms, parts in self._groups.everybody.gather(measured):
            # The slowest replica counts, because the others wait for it.
            slowest = [key for key, time in times.items() if time >= seconds.get(key, 0.0)]
            seconds |= {key: times[key] for key in slowest}
            self.terms |= {key: terms[key] for key in slowest}
            kept |= memory
            collectives |= parts
        indices = range(self._schedule.stages)
        usual = usual_times(self._schedule.stages)
        return Costs(
            [_times(stage, seconds) if seconds else usual[stage] for stage in indices],
            [kept[stage] for stage in indices],
            links,
            wiring=self._dataflow.wiring,
            collectives=[collectives.get(stage, StageCollectives()) for stage in indices]
            if collectives
            else (),
        )


def _limit_text(limits: Sequence[int]) -> str:
    """A memory limit as text: ``12,000``, or ``12,000 / 8,000`` if ranks have different limits."""
    return " / ".join(f"{limit:,}" for limit in (limits if len({*limits}) > 1 else limits[:1]))


def _times(stage: int, seconds: Mapping[tuple[int, ActionKind], float]) -> StageTimes:
    half = seconds.get((stage, ActionKind.BACKWARD), 0.0) / 2  # the half of a full backward
    return (
        seconds[stage, ActionKind.FORWARD],
        seconds.get((stage, ActionKind.BACKWARD_INPUT), half),
        seconds.get((stage, ActionKind.BACKWARD_WEIGHT), half),
    )
