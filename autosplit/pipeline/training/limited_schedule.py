"""``memory_limit`` of a trainer: the shortest step in which no rank holds more than that."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NoReturn

from autosplit.errors import PipelineError, ScheduleError
from autosplit.pipeline.engine.execution.stage_assembly import TrainableStage
from autosplit.pipeline.engine.messages.process_groups import Groups
from autosplit.pipeline.ledger.prediction import Evicted, RankReplay
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Wiring
from autosplit.pipeline.search.within_memory import search_within
from autosplit.pipeline.simulation.activation_memory import peak_memory
from autosplit.pipeline.simulation.reductions import Reductions
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.timeline import Span
from autosplit.pipeline.simulation.transfer import Transfer

from .auto_schedule import MEASURED, Tuner

_TRIES = 3  # searches, each with less room where the one before found too little
_HALVINGS = 2  # of the range in which the least limit is looked for
_CORRECTIONS = 3  # schedules that held more than was known of them, before it is given up
_SETTLED = 2  # steps of a new schedule, of which the first makes its buffers


class LimitTuner(Tuner):
    """Searches within a limit: before the first step by graphs and usual times; once steps were
    measured by their times and with what operators took for themselves; and again should a step of
    what was found hold more.

    A search knows microbatches by their sizes. What it finds is played with all storages, and
    where that is more than the limit the next search has so much less.

    Args:
        schedule: whose placement and number of microbatches are kept.
        groups: the trainer's process groups.
        limit: bytes that a rank may hold.
        fixed: this rank's bytes of parameters, gradients, optimizer state and batch.
        replay: plays this rank's part of a schedule; None where a stage's graphs are not known.
        measured: what the last step held by action, see ``RankLedger.measured``; empty where that
            was not recorded.
        links: measures the links between ranks and to the host's store; collective.
        wiring: who feeds whom; None: each stage the next.
        early_weights: whether the trainer runs Ws in every wait.
    """

    def __init__(
        self,
        schedule: Schedule,
        groups: Groups,
        *,
        limit: int,
        fixed: Callable[[], int],
        replay: Callable[[Schedule], RankReplay | None],
        measured: Callable[[], Mapping[str, int]],
        links: Callable[[], Transfer],
        wiring: Wiring | None = None,
        early_weights: bool = False,
        reductions: Callable[[int], Reductions | None] = lambda slices: None,
    ) -> None:
        super().__init__(
            schedule,
            groups,
            links=links,
            wiring=wiring,
            early_weights=early_weights,
            reductions=reductions,
        )
        self.measured = schedule
        self._limit = limit
        self._fixed = fixed
        self._replay = replay
        self._levels = measured
        self._running = schedule
        self._fixed_by_rank: list[int] = []
        # What operators take for themselves: bytes by stage and kind of action, of this rank.
        self._operators: dict[tuple[int, ActionKind], int] = {}
        self._found_first = False
        self._since = 0
        self._corrections = 0

    def before_step(self, stages: Mapping[int, TrainableStage]) -> Schedule:
        """What to run until steps are measured; collective.

        Raises:
            PipelineError: nothing keeps the limit; says the least that would do and of what.
        """
        return self._shortest(self._costs(stages))

    def after_step(
        self, spans: Sequence[Span], stages: Mapping[int, TrainableStage]
    ) -> Schedule | None:
        """As ``Tuner.after_step``.

        Raises:
            PipelineError: as ``before_step``; what is measured beside the graphs is in it.
        """
        if not self._found_first:
            self._steps.append(list(spans))
            if len(self._steps) <= MEASURED:
                return None
            self._found_first = True
            self._note_operators()
            return self._shortest(self._costs(stages))
        self._since += 1
        if self._since < _SETTLED:
            return None
        self._since = 0
        held = self._note_operators()
        if max(self._groups.everybody.gather(held)) <= self._limit:
            self.done = True
            return None
        self._corrections += 1
        if self._corrections > _CORRECTIONS:
            self._refuse(self._costs(stages))
        return self._shortest(self._costs(stages))

    # --- what ranks hold --------------------------------------------------------------------------

    def _note_operators(self) -> int:
        """Note what the last step held above what is known of it; its peak with all there is."""
        measured = self._levels()
        for action, level in self._played(self._running):
            key = action.stage, action.kind
            more = measured.get(str(action), 0) - level
            self._operators[key] = max(self._operators.get(key, 0), more)
        return self._fixed() + max(measured.values(), default=0)

    def _played(self, schedule: Schedule) -> list[tuple[Action, int]]:
        """This rank's actions with what it holds then beside the fixed; collective."""
        replay = self._replay(schedule)
        if replay is not None:
            replay.peak({})
        guests: Evicted = {}
        for part in self._groups.everybody.gather({} if replay is None else replay.evicted):
            guests |= part
        return [] if replay is None else replay.levels(guests)

    def _held(self, schedule: Schedule, costs: Costs) -> list[float]:
        """Per rank, the most that it will hold; collective."""
        most: dict[int, int] = defaultdict(int)
        for (stage, _), size in self._operators.items():
            most[stage] = max(most[stage], size)
        played = self._played(schedule)
        levels = [level + self._more(action, most[action.stage]) for action, level in played]
        own = max(levels) if levels else None
        by_size = peak_memory(schedule, costs.memory)
        return [
            fixed + (known if most is None else most)
            for fixed, most, known in zip(
                self._fixed_by_rank, self._most(own), by_size, strict=True
            )
        ]

    def _most(self, own: int | None) -> list[int | None]:
        """Per rank of the pipeline the greatest number of all replicas, None where none is known;
        collective.
        """
        heard = self._groups.everybody.gather(own)
        columns = self._groups.layout.columns
        known = [[heard[at] for at in ranks if heard[at] is not None] for ranks in columns]
        return [max(each, default=None) for each in known]

    def _more(self, action: Action, most: int) -> int:
        """What operators of an action take; ``most`` where its kind was not measured."""
        kind = ActionKind.FORWARD if action.kind is ActionKind.RECOMPUTE else action.kind
        return self._operators.get((action.stage, kind), most) if kind.is_compute else 0

    # --- searching --------------------------------------------------------------------------------

    def _shortest(self, costs: Costs) -> Schedule:
        self._fixed_by_rank = [size or 0 for size in self._most(self._fixed())]
        found = self._within(costs, self._limit)
        if found is None:
            self._refuse(costs)
        self._running = found
        return found

    def _within(self, costs: Costs, limit: float) -> Schedule | None:
        """The shortest step that is found within a limit; collective."""
        taken: list[float] = [*self._fixed_by_rank]
        for _ in range(_TRIES):
            try:
                made = search_within(
                    costs,
                    self._schedule.microbatches,
                    limit,
                    ranks=len(self._schedule.ranks),
                    placement=self._schedule.placement,
                    fixed=taken,
                )
            except ScheduleError:
                break
            found = replace(made.schedule, crosses_step=False)
            over = [held - limit for held in self._held(found, costs)]
            if max(over) <= 0:
                return found
            taken = [size + max(0.0, more) for size, more in zip(taken, over, strict=True)]
        # The search may miss what is known to fit.
        known = (self._running, self._schedule)
        return next((each for each in known if max(self._held(each, costs)) <= limit), None)

    def _refuse(self, costs: Costs) -> NoReturn:
        """Say the least limit for which something is found."""
        known = (self._running, self._schedule)
        most, best = min(
            ((max(self._held(each, costs)), each) for each in known), key=itemgetter(0)
        )
        low = float(max(self._limit, *self._fixed_by_rank))
        for _ in range(_HALVINGS):
            middle = float(int((low + most) / 2))
            found = self._within(costs, middle)
            if found is None:
                low = middle
            else:
                best, most = found, max(self._held(found, costs))
        held = self._held(best, costs)
        rank = held.index(max(held))
        fixed = self._fixed_by_rank[rank]
        kept = held[rank] - fixed
        advice = (
            "use more ranks, or an optimizer that keeps less"
            if fixed > kept
            else "cut the batch into more and smaller microbatches"
        )
        yet = "" if self._found_first else "; what operators take for themselves may come on top"
        raise PipelineError(
            f"memory_limit: nothing was found that keeps {self._limit:,} bytes; the least that was "
            f"needs memory_limit={math.ceil(most)}, where rank {rank} holds {fixed:,} bytes of "
            "parameters, gradients, optimizer state and batch, and "
            f"{kept:,.0f} of microbatches and messages{yet}. Use that limit, or {advice}"
        )
