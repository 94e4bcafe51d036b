"""``memory_limit`` of a trainer: the shortest step in which no rank holds more than that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.stages import TrainableStage
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.search.within_memory import LimitError, search_within
from autosplit.pipeline.simulation.activation_memory import peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.text.progress import working

from .auto_schedule import Tuner
from .rank_memory import RankMemory

_TRIES = 6  # searches, each with what the schedule before it turned out to hold beside


class MemoryLimitError(PipelineError):
    """Nothing was found within ``memory_limit``; ``least`` bytes is what something was found for,
    as far as is known.
    """

    # A default, because an error on its way to another process is made from its message alone.
    def __init__(self, message: str, least: int = 0) -> None:
        super().__init__(message)
        self.least = least


class LimitTuner(Tuner):
    """Searches within a limit: before the first step by usual times, and once steps were measured
    by theirs.

    A search knows microbatches by their sizes. What a rank holds beside them is known of a schedule
    that was found, by playing it with all storages: the next search leaves so much room on each
    rank.

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

    def _links(self) -> Transfer:
        return replace(super()._links(), host=self._size.host_link())

    def before_step(self, stages: Mapping[int, TrainableStage]) -> Schedule:
        """What to run until steps are measured; collective.

        Raises:
            MemoryLimitError: nothing keeps the limit; says the least that would do and of what.
        """
        return self._search(self._costs(stages))

    def _search(self, costs: Costs) -> Schedule:
        with working(f"searching a schedule that keeps {self._limit:,} bytes"):
            self._running = self._shortest(costs)
        return self._running

    def _shortest(self, costs: Costs) -> Schedule:
        fixed = self._most(self._size.fixed_bytes() + self._size.batch_bytes)
        beside = [0.0] * len(fixed)
        for _ in range(_TRIES):
            found = self._within(costs, self._limit, fixed, beside)
            held = self._held(found, costs)
            if max(held) <= self._limit:
                return found
            kept = peak_memory(found, costs.memory)
            room = zip(beside, held, fixed, kept, strict=True)
            more = [max(known, all_ - rest - own) for known, all_, rest, own in room]
            if more == beside:
                break
            beside = more
        # The search may miss what is known to fit, or what a refusal advised a limit for: what it
        # offers for a limit that nothing keeps, the same whatever the limit is.
        there = [self._running, self.schedule, self._within(costs, 1, fixed, [0.0] * len(fixed))]
        pairs = [(self._held(each, costs), each) for each in there]
        held, found = min(pairs, key=lambda pair: max(pair[0]))
        least = max(held)
        if least <= self._limit:
            return found
        rank = held.index(least)
        kept_there = least - fixed[rank]
        advice = (
            "use more ranks, or an optimizer that keeps less"
            if fixed[rank] > kept_there
            else "cut the batch into more and smaller microbatches"
        )
        raise MemoryLimitError(
            f"memory_limit: nothing was found that keeps {self._limit:,} bytes; the least that was "
            f"needs memory_limit={least}, where rank {rank} holds {fixed[rank]:,} bytes of "
            f"parameters, gradients, optimizer state and batch, and {kept_there:,} of microbatches "
            f"and messages. Use that limit, or {advice}",
            least,
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
        schedule = self.schedule
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
