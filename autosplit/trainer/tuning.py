"""Search for a trainer's schedule: for measured times, or within a memory limit.

schedule="auto"   measure steps 2 and 3, then search the shortest step for their times
memory_limit=     search for usual times before step 1, and for measured times after step 3; also
                  before a step with more or larger microbatches than all searches so far
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autosplit.errors import BatchError, ScheduleError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.builders.placement import StageTimes
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.ledger.prediction import stage_memory
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.search.search import search
from autosplit.pipeline.search.within_memory import LimitError, search_within
from autosplit.pipeline.simulation.activation_memory import (
    StageMemory,
    largest_memory,
    levels_of,
    peak_memory,
)
from autosplit.pipeline.simulation.collectives import StageCollectives
from autosplit.pipeline.simulation.simulate import Costs, Span, median_durations
from autosplit.pipeline.simulation.size_costs import Terms, fit_terms, seconds_of_size
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.ranks.groups import Groups
from autosplit.text.progress import working
from autosplit.trainer.rank_memory import LargestMicrobatches, RankMemory
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


class ListBudget(NamedTuple):
    """The bytes that lists may keep within a limit.

    Attributes:
        caps: per rank, the most bytes of microbatches.
        units: per stage, the bytes of a microbatch for each of its elements.
    """

    caps: tuple[float, ...]
    units: tuple[StageMemory, ...]


class Tuner:
    """Measures the first steps, and searches schedules for their times, or for usual times before
    they are measured. Every rank gets the same schedule.

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
        self._schedule = schedule
        self._groups, self._dataflow, self._model = groups, dataflow, model
        self._memory, self._limits = memory, limits
        self._steps: list[list[Span]] = []
        self._points = defaultdict[tuple[int, ActionKind], list[tuple[float, float]]](list)
        self.terms: dict[tuple[int, ActionKind], Terms] = {}

    def record_step(self, spans: Sequence[Span], elements: Sequence[int]) -> bool:
        """Record a step, and return whether enough steps are measured.

        Args:
            spans: the times of this rank's actions, in order.
            elements: the size of each microbatch.
        """
        if self._steps:  # the first step builds the stages
            for span in spans:
                size = max(elements[span.action.microbatch], 1)
                point = float(size), span.end - span.start
                self._points[span.action.stage, span.action.kind].append(point)
        self._steps.append(list(spans))
        return len(self._steps) > MEASURED

    def search_schedule(self, stages: Mapping[int, TrainableStage]) -> Schedule:
        """Search the schedule with the shortest step, without limits; collective."""
        memory = {index: stage_memory(stage) for index, stage in stages.items()}
        costs = self._costs(memory)
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

    def search_within(
        self,
        stages: Mapping[int, TrainableStage],
        count: int,
        elements: int,
        largest: LargestMicrobatches,
        text: str,
        earlier: Schedule | None = None,
    ) -> tuple[Schedule, ListBudget]:
        """Search the schedule with the shortest step within the limits; collective.

        Args:
            stages: this rank's stages.
            count: the number of microbatches.
            elements: the size of each microbatch, on which its times depend.
            largest: the largest microbatches; all microbatches are assumed to be as large.
            text: the microbatch with the most elements, for an error.
            earlier: a schedule that an earlier search has found for them.

        Returns:
            The schedule, and the bytes that other orders may keep.

        Raises:
            BatchError: on all ranks: no schedule within the limits was found. The message has the
                smallest limit for which a schedule was found, and the bytes of the rank that needs
                that limit.
        """
        costs = self._costs(self._memory.stage_memory(stages, largest), elements)
        with working(f"searching a schedule within {_limit_text(self._limits)} bytes"):
            return self._shortest(costs, count, elements, largest, text, earlier)

    def _shortest(
        self,
        costs: Costs,
        count: int,
        elements: int,
        largest: LargestMicrobatches,
        text: str,
        earlier: Schedule | None,
    ) -> tuple[Schedule, ListBudget]:
        limits = self._limits

        def excess(peaks: Sequence[int]) -> int:
            return max(peak - limit for peak, limit in zip(peaks, limits, strict=True))

        fixed = self._maxima(self._memory.fixed_bytes() + largest.batch_bytes)
        reserved = [0.0] * len(fixed)
        for _ in range(_TRIES):
            schedule = self._search_schedule(costs, count, limits, fixed, reserved)
            peaks = self._peaks(schedule, costs, largest, fixed)
            if excess(peaks) <= 0:
                return schedule, self._budget(schedule, costs, elements, largest, fixed)
            kept = peak_memory(schedule, costs.memory)
            further = [peaks[rank] - fixed[rank] - kept[rank] for rank in range(len(fixed))]
            larger = [*map(max, reserved, further)]
            if larger == reserved:
                break
            reserved = larger
        # The search may miss a schedule that is known to fit, or that of the least limit, which
        # an earlier error may have advised; that one does not depend on the limit.
        frugal = self._search_schedule(costs, count, 1, fixed, [0.0] * len(fixed))
        candidates = [frugal]
        candidates += [c for c in (earlier, self._schedule) if c and c.microbatches == count]
        pairs = [(self._peaks(c, costs, largest, fixed), c) for c in candidates]
        peaks, schedule = min(pairs, key=lambda pair: excess(pair[0]))
        most = excess(peaks)
        if most <= 0:
            return schedule, self._budget(schedule, costs, elements, largest, fixed)
        rank = next(at for at, peak in enumerate(peaks) if peak - limits[at] == most)
        needed = [*map(max, peaks, limits)]
        least = str(max(peaks) if len({*limits}) == 1 else needed)
        microbatches = peaks[rank] - fixed[rank]
        advice = (
            "use more ranks, or an optimizer with less state"
            if fixed[rank] > microbatches
            else "cut the batch into more and smaller microbatches"
        )
        sizes = [max(memory.saved, memory.deferred) for memory in costs.memory]
        raise BatchError(
            f"memory_limit: no schedule was found within {_limit_text(limits)} bytes; the most "
            f"frugal schedule needs memory_limit={least}: on rank {rank} {fixed[rank]:,} bytes of "
            f"parameters, gradients, optimizer state and batch, and {microbatches:,} bytes of "
            f"microbatches and messages; {text} keeps {max(sizes):,.0f} bytes on stage "
            f"{sizes.index(max(sizes))}. Use that limit, or {advice}"
        )

    def _budget(
        self,
        schedule: Schedule,
        costs: Costs,
        elements: int,
        largest: LargestMicrobatches,
        fixed: Sequence[int],
    ) -> ListBudget:
        """The bytes of microbatches that other orders of actions may keep, so that they stay within
        the limits as ``schedule`` does; collective."""
        kept = [*levels_of(schedule, costs.memory)[self._groups.rank]]
        levels = self._memory.levels(schedule, largest) or [*map(math.ceil, kept)]
        differences = [level - state for level, state in zip(levels, kept, strict=True)]
        workspaces = self._maxima(math.ceil(max(differences, default=0.0)))
        rows = zip(self._limits, fixed, workspaces, strict=True)
        caps = [float(limit - size - workspace) for limit, size, workspace in rows]
        units = [StageMemory(m.saved / elements, m.deferred / elements) for m in costs.memory]
        return ListBudget(tuple(caps), tuple(units))

    def _peaks(
        self,
        schedule: Schedule,
        costs: Costs,
        largest: LargestMicrobatches,
        fixed: Sequence[int],
    ) -> list[int]:
        """Predict the peak memory of each rank in bytes; collective. The prediction uses graphs and
        messages if all stages have graphs, else the costs of stages.
        """
        levels = self._memory.levels(schedule, largest)
        peak = peak_memory(schedule, costs.memory)[self._groups.rank]
        if levels is not None:
            peak = max(levels, default=0)
        return [*map(sum, zip(fixed, self._maxima(math.ceil(peak)), strict=True))]

    def _maxima(self, number: int) -> list[int]:
        """For each rank of the pipeline, the largest ``number`` over all replicas; collective."""
        gathered = self._groups.everybody.gather(number)
        return [max(gathered[rank] for rank in ranks) for ranks in self._groups.layout.columns]

    def _search_schedule(
        self,
        costs: Costs,
        count: int,
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
                count,
                limit,
                ranks=len(schedule.ranks),
                placement=schedule.placement,
                fixed=[*map(sum, zip(fixed, reserved, strict=True))],
            )
        except LimitError as error:
            result = error.schedule
        return replace(result or schedule, crosses_step=False)

    def _costs(self, kept_here: Mapping[int, StageMemory], elements: int = 0) -> Costs:
        """The costs of a step, from the measured times of all ranks or from usual times;
        collective.

        Messages take no time in these costs, because their time hardly ever changes the order of
        actions. A move to a partner takes as long as a move to the offload target.

        Args:
            kept_here: the memory that a microbatch keeps on each of this rank's stages.
            elements: the size of a microbatch; 0: as in the measured steps.
        """
        links = Transfer()
        if self._limits:
            host = self._memory.host_link()
            links = Transfer(host.latency, host.bandwidth, host=host)
        is_measured = len(self._steps) > MEASURED
        measured = (
            median_durations(self._steps[1:]) if is_measured else {},
            kept_here,
            {key: fit_terms(points) for key, points in self._points.items()},
            self._model.collectives() if is_measured else {},
        )
        seconds: dict[tuple[int, ActionKind], float] = {}
        kept: dict[int, StageMemory] = {}
        collectives: dict[int, StageCollectives] = {}
        for times, memory, terms, parts in self._groups.everybody.gather(measured):
            # The slowest replica counts, because the others wait for it.
            slowest = [key for key, time in times.items() if time >= seconds.get(key, 0.0)]
            seconds |= {key: times[key] for key in slowest}
            self.terms |= {key: terms[key] for key in slowest}
            for stage, most in memory.items():
                kept[stage] = largest_memory([kept.get(stage, most), most])
            collectives |= parts
        if elements and seconds:
            seconds = {key: seconds_of_size(self.terms[key], elements) for key in seconds}
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
