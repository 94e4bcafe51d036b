"""``memory_limit`` of a trainer: the shortest step in which no rank holds more than that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NoReturn

import torch

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.stages import TrainableStage
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.search.within_memory import LimitError, search_within
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.timeline import Span
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.text.progress import working

from .auto_schedule import MEASURED, Tuner
from .rank_memory import RankMemory

_TRIES = 6  # searches, each with what the schedule before it turned out to hold beside
_CORRECTIONS = 3  # schedules that held more than was known of them, before it is given up


class MemoryLimitError(PipelineError):
    """Nothing was found within ``memory_limit``; ``least`` bytes is what something was found for,
    as far as is known.
    """

    # A default, because an error on its way to another process is made from its message alone.
    def __init__(self, message: str, least: int = 0) -> None:
        super().__init__(message)
        self.least = least


class LimitTuner(Tuner):
    """Searches within a limit: before the first step by graphs and usual times; once steps were
    measured by their times and with what operators took for themselves; and again should a step of
    what was found hold more.

    A search knows microbatches by their sizes. What a rank holds beside them is known of a schedule
    that was found, by playing it with all storages and by what was measured above that: the next
    search leaves so much room on each rank.

    Args:
        schedule: whose placement and number of microbatches are kept.
        groups: the trainer's process groups.
        feeds: who feeds whom.
        device: where the stages run.
        limit: bytes that a rank may hold.
        size: tells this rank's bytes.
    """

    def __init__(
        self,
        schedule: Schedule,
        groups: Groups,
        feeds: Feeds,
        device: torch.device,
        limit: int,
        size: RankMemory,
    ) -> None:
        super().__init__(schedule, groups, feeds, device)
        self._limit = limit
        self._size = size
        self._running = schedule
        self._fixed_by_rank: list[int] = []
        self._memory: Sequence[StageMemory] = ()
        # What operators take for themselves, by rank; and what a schedule was measured to hold.
        self._operators = [0] * len(schedule.ranks)
        self._measured: tuple[Schedule, list[int]] | None = None
        self._timed = False
        self._corrections = 0

    def _links(self) -> Transfer:
        return replace(super()._links(), host=self._size.host_link())

    def before_step(self, stages: Mapping[int, TrainableStage]) -> Schedule:
        """What to run until steps are measured; collective.

        Raises:
            MemoryLimitError: nothing keeps the limit; says the least that would do and of what.
        """
        with working(f"searching a schedule that keeps {self._limit:,} bytes"):
            return self._shortest(self._costs(stages))

    def after_step(
        self, spans: Sequence[Span], stages: Mapping[int, TrainableStage]
    ) -> Schedule | None:
        """As ``Tuner.after_step``.

        Raises:
            MemoryLimitError: as ``before_step``; what is measured beside the graphs is in it.
        """
        if not self._timed:
            self._steps.append(list(spans))
            if len(self._steps) <= MEASURED:
                return None
            self._timed = True
            self._weigh()
        elif max(self._weigh()) <= self._limit:
            self.done = True
            return None
        else:
            self._corrections += 1
            if self._corrections > _CORRECTIONS:
                self._refuse(self._running)
        return self.before_step(stages)

    # --- what ranks hold --------------------------------------------------------------------------

    def _weigh(self) -> list[int]:
        """Per rank, the most that the last step held, of which later searches know; collective."""
        activations = self._size.measured()
        held = self._most(self._fixed() + activations)
        known = self._most(self._fixed() + self._played(self._running))
        more = zip(self._operators, held, known, strict=True)
        self._operators = [max(before, now - foretold) for before, now, foretold in more]
        if all(self._groups.everybody.gather(bool(activations))):
            self._measured = self._running, held
        return held

    def _fixed(self) -> int:
        return self._size.fixed_bytes() + self._size.batch_bytes

    def _played(self, schedule: Schedule) -> int:
        """The most that this rank holds beside the fixed, by graphs and messages; collective."""
        levels = self._size.levels(schedule)
        if levels is None:
            return math.ceil(peak_memory(schedule, self._memory)[self._groups.rank])
        return max(levels, default=0)

    def _held(self, schedule: Schedule) -> list[int]:
        """Per rank, the most that it will hold; collective."""
        if self._measured is not None and self._measured[0] == schedule:
            return self._measured[1]
        foretold = self._most(self._fixed() + self._played(schedule))
        return [known + more for known, more in zip(foretold, self._operators, strict=True)]

    def _most(self, own: int) -> list[int]:
        """Per rank of the pipeline the greatest number of all replicas; collective."""
        heard = self._groups.everybody.gather(own)
        return [max(heard[at] for at in ranks) for ranks in self._groups.layout.columns]

    # --- searching --------------------------------------------------------------------------------

    def _shortest(self, costs: Costs) -> Schedule:
        """The shortest step that is found within the limit; collective."""
        self._memory = costs.memory
        self._fixed_by_rank = self._most(self._fixed())
        beside = [0.0] * len(self._fixed_by_rank)
        for _ in range(_TRIES):
            found = self._search(costs, self._limit, beside)
            held = self._held(found)
            if max(held) <= self._limit:
                self._running = found
                return found
            kept = peak_memory(found, costs.memory)
            room = zip(beside, held, self._fixed_by_rank, kept, strict=True)
            more = [max(known, all_ - fixed - own) for known, all_, fixed, own in room]
            if more == beside:
                break
            beside = more
        # The search may miss what is known to fit, or what a refusal advised a limit for: what it
        # offers for a limit that nothing keeps, the same whatever the limit is.
        there = [self._running, self.schedule, self._search(costs, 1, [0.0] * len(beside))]
        least, found = min(((max(self._held(each)), each) for each in there), key=itemgetter(0))
        if least > self._limit:
            self._refuse(found)
        self._running = found
        return found

    def _search(self, costs: Costs, limit: float, beside: Sequence[float]) -> Schedule:
        """What is found within some bytes beside what a rank holds anyway, or the nearest to it."""
        schedule = self.schedule
        try:
            found: Schedule | None = search_within(
                costs,
                schedule.microbatches,
                limit,
                ranks=len(schedule.ranks),
                placement=schedule.placement,
                fixed=[*map(sum, zip(self._fixed_by_rank, beside, strict=True))],
            )
        except LimitError as error:
            found = error.schedule
        return replace(found or schedule, crosses_step=False)

    def _refuse(self, found: Schedule) -> NoReturn:
        """Say the least limit for which something is found, and what nothing can do without."""
        held = self._held(found)
        least = max(held)
        rank = held.index(least)
        fixed = self._fixed_by_rank[rank]
        kept = least - fixed
        bound = max(
            each + max(self._memory[stage].least for stage in self.schedule.held(rank))
            for rank, each in enumerate(self._fixed_by_rank)
        )
        advice = (
            "use more ranks, or an optimizer that keeps less"
            if fixed > kept
            else "cut the batch into more and smaller microbatches"
        )
        yet = "" if self._timed else "; what operators take for themselves may come on top"
        raise MemoryLimitError(
            f"memory_limit: nothing was found that keeps {self._limit:,} bytes; the least that was "
            f"needs memory_limit={least}, where rank {rank} holds {fixed:,} bytes of "
            "parameters, gradients, optimizer state and batch, and "
            f"{kept:,} of microbatches and messages{yet}; no schedule can do with less than "
            f"{bound:,.0f}. Use that limit, or {advice}",
            least,
        )
