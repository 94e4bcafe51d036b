"""``memory_limit`` of a trainer: the shortest step in which no rank holds more than that."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NoReturn

import torch

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.stages import TrainableStage
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.search.within_memory import LimitError, search_within
from autosplit.pipeline.simulation.activation_memory import StageMemory, levels_of
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.timeline import Span
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.text.progress import working

from .auto_schedule import MEASURED, Tuner
from .rank_memory import RankMemory

_TRIES = 6  # searches, each with what the schedule before it turned out to hold beside
_CORRECTIONS = 3  # schedules that held more than was known of them, before it is given up

_KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
    ActionKind.BACKWARD,
)

Beside = dict[tuple[int, ActionKind], int]
"""Bytes by stage and kind of action."""


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

    A search knows microbatches by their sizes, and what actions hold beside them while they run:
    by playing schedules with all storages, and by what was measured above that. Where what it finds
    turns out to hold more than the limit, the next search knows of that, too, or aims lower.

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
        self._sizes: Sequence[StageMemory] = ()
        # Of this rank: what operators take for themselves, and what graphs and messages hold
        # beside what microbatches do.
        self._operators: Beside = {}
        self._graphs: Beside = {}
        self._measured: tuple[Schedule, list[float]] = schedule, []
        self._found_first = False
        self._corrections = 0

    def _links(self) -> Transfer:
        return replace(super()._links(), host=self._size.host_link())

    def before_step(self, stages: Mapping[int, TrainableStage]) -> Schedule:
        """What to run until steps are measured; collective.

        Raises:
            MemoryLimitError: nothing keeps the limit; says the least that would do and of what.
        """
        return self._within(stages)

    def after_step(
        self, spans: Sequence[Span], stages: Mapping[int, TrainableStage]
    ) -> Schedule | None:
        """As ``Tuner.after_step``.

        Raises:
            MemoryLimitError: as ``before_step``; what is measured beside the graphs is in it.
        """
        if not self._found_first:
            self._steps.append(list(spans))
            if len(self._steps) <= MEASURED:
                return None
            self._found_first = True
            self._note_measured()
            return self._within(stages)
        if max(self._note_measured()) <= self._limit:
            self.done = True
            return None
        self._corrections += 1
        if self._corrections > _CORRECTIONS:
            self._refuse(max(self._held(self._running)), self._running)
        return self._within(stages)

    # --- what ranks hold --------------------------------------------------------------------------

    def _note_measured(self) -> list[float]:
        """Note what the last step held above what is known of it; per rank, the most that it held
        with all there is. Collective.
        """
        measured = self._size.measured()
        for action, level in self._played(self._running):
            _raise(self._operators, action, measured.get(str(action), 0) - level)
        most = [
            float(each) for each in self._most(self._fixed() + max(measured.values(), default=0))
        ]
        if all(self._groups.everybody.gather(bool(measured))):
            self._measured = self._running, most
        return most

    def _fixed(self) -> int:
        return self._size.fixed_bytes() + self._size.batch_bytes

    def _note_graphs(self, schedule: Schedule, *, least: bool = False) -> None:
        """Note what this rank's actions hold beside microbatches under a schedule; collective.

        Args:
            schedule: legal.
            least: of actions of a kind what the least of them holds, rather than the most.
        """
        known, found = self._by_size(schedule), dict[tuple[int, ActionKind], int]()
        for (action, level), before in zip(self._played(schedule), known, strict=True):
            size, key = level - before, _key(action)
            if action.kind.is_compute:
                found[key] = (min if least else max)(size, found.get(key, size))
        for key, size in found.items():
            self._graphs[key] = max(size, self._graphs.get(key, 0))

    def _by_size(self, schedule: Schedule) -> list[int]:
        """What this rank's microbatches hold during each action of its row."""
        rank = self._groups.rank
        return [math.ceil(level) for level in levels_of(schedule, self._sizes)[rank]]

    def _played(self, schedule: Schedule) -> list[tuple[Action, int]]:
        """This rank's actions with what it holds then beside the fixed; collective."""
        levels = self._size.levels(schedule)
        if levels is None:
            levels = self._by_size(schedule)
        return list(zip(schedule.ranks[self._groups.rank], levels, strict=True))

    def _held(self, schedule: Schedule) -> list[float]:
        """Per rank, the most that it will hold; collective. What was measured is known. Elsewhere
        what one action was seen to take above what is known of it, any of its kind may.
        """
        measured, seen = self._measured
        if schedule is measured and seen:
            return seen
        most: dict[int, int] = defaultdict(int)
        for (stage, _), size in self._operators.items():
            most[stage] = max(most[stage], size)
        levels = [
            level + (self._operators.get(_key(action), most[action.stage]))
            if action.kind.is_compute
            else level
            for action, level in self._played(schedule)
        ]
        held = zip(self._fixed_by_rank, self._most(max(levels, default=0)), strict=True)
        return [float(fixed + most) for fixed, most in held]

    def _most(self, own: int) -> list[int]:
        """Per rank of the pipeline the greatest number of all replicas; collective."""
        heard = self._groups.everybody.gather(own)
        return [max(heard[at] for at in ranks) for ranks in self._groups.layout.columns]

    def _weighed(self, costs: Costs) -> Costs:
        """Costs with what actions hold beside microbatches; collective."""
        own = {key: size + self._operators.get(key, 0) for key, size in self._graphs.items()}
        beside: Beside = {}
        for each in self._groups.everybody.gather(own):
            beside |= {key: max(size, beside.get(key, 0)) for key, size in each.items()}
        found = []
        for stage, size in enumerate(self._sizes):
            most = max((more for (s, _), more in beside.items() if s == stage), default=0)
            forward, inputs, weights, whole = (
                float(beside.get((stage, kind), most)) for kind in _KINDS
            )
            found.append(replace(size, workspace=(forward, inputs, weights, whole)))
        return replace(costs, memory=found)

    # --- searching --------------------------------------------------------------------------------

    def _within(self, stages: Mapping[int, TrainableStage]) -> Schedule:
        """``_shortest`` for what is known of the stages; collective."""
        with working(f"searching a schedule that keeps {self._limit:,} bytes"):
            return self._shortest(self._costs(stages))

    def _shortest(self, costs: Costs) -> Schedule:
        """The shortest step that is found within the limit; collective."""
        self._fixed_by_rank = self._most(self._fixed())
        self._sizes = costs.memory
        self._note_graphs(self._running, least=True)
        for most, found in self._tried(costs, float(self._limit)):
            if most <= self._limit:
                self._running = found
                return found
        # The search may miss what is known to fit, or what a refusal advised a limit for: what it
        # offers for a limit that nothing keeps, the same whatever the limit and the trainer's own
        # schedule are.
        there = [(max(self._held(each)), each) for each in (self._running, self.schedule)]
        noted, self._graphs = self._graphs, {}
        there += self._tried(costs, 1.0)
        self._graphs = noted
        least, found = min(there, key=itemgetter(0))
        if least > self._limit:
            self._refuse(least, found)
        self._running = found
        return found

    def _tried(self, costs: Costs, aim: float) -> Iterator[tuple[float, Schedule]]:
        """What is found within ``aim`` bytes, with the most that a rank then holds; again with what
        that was found to hold beside microbatches, until there is no more to tell the search but
        how far it was off.
        """
        seen: list[Costs] = []
        most = 0.0
        for _ in range(_TRIES):
            weighed = self._weighed(costs)
            if weighed in seen:
                aim -= most - self._limit
                if aim <= max(self._fixed_by_rank):
                    return
            seen.append(weighed)
            found = self._search(weighed, aim)
            if found is None:
                return
            most = max(self._held(found))
            yield most, found
            self._note_graphs(found)

    def _search(self, costs: Costs, aim: float) -> Schedule | None:
        """What is found within ``aim`` bytes, or the nearest to that; None: nothing."""
        schedule = self.schedule
        try:
            found: Schedule | None = search_within(
                costs,
                schedule.microbatches,
                aim,
                ranks=len(schedule.ranks),
                placement=schedule.placement,
                fixed=self._fixed_by_rank,
            ).schedule
        except LimitError as error:
            found = error.schedule
        return None if found is None else replace(found, crosses_step=False)

    def _refuse(self, least: float, found: Schedule) -> NoReturn:
        """Say the least limit for which something is found, and what nothing can do without."""
        held = self._held(found)
        rank = held.index(max(held))
        fixed = self._fixed_by_rank[rank]
        kept = held[rank] - fixed
        bound = max(
            each + max(self._sizes[stage].least for stage in self.schedule.held(rank))
            for rank, each in enumerate(self._fixed_by_rank)
        )
        advice = (
            "use more ranks, or an optimizer that keeps less"
            if fixed > kept
            else "cut the batch into more and smaller microbatches"
        )
        yet = "" if self._found_first else "; what operators take for themselves may come on top"
        raise MemoryLimitError(
            f"memory_limit: nothing was found that keeps {self._limit:,} bytes; the least that was "
            f"needs memory_limit={math.ceil(least)}, where rank {rank} holds {fixed:,} bytes of "
            "parameters, gradients, optimizer state and batch, and "
            f"{kept:,.0f} of microbatches and messages{yet}; no schedule can do with less than "
            f"{bound:,.0f}. Use that limit, or {advice}",
            math.ceil(least),
        )


def _key(action: Action) -> tuple[int, ActionKind]:
    """Stage and kind; what is run again takes what its F takes."""
    again = action.kind is ActionKind.RECOMPUTE
    return action.stage, ActionKind.FORWARD if again else action.kind


def _raise(beside: Beside, action: Action, size: int) -> None:
    """Note what an action holds, if it is one that computes."""
    if action.kind.is_compute:
        beside[_key(action)] = max(beside.get(_key(action), 0), size)
