"""``memory_limit`` of a trainer: the shortest step in which no rank holds more than that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autosplit.errors import PipelineError, ScheduleError
from autosplit.pipeline.engine.execution.stage_assembly import TrainableStage
from autosplit.pipeline.engine.messages.process_groups import Groups
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Wiring
from autosplit.pipeline.search.within_memory import search_within
from autosplit.pipeline.simulation.activation_memory import peak_memory
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.timeline import Span
from autosplit.pipeline.simulation.transfer import Transfer

from .auto_schedule import MEASURED, Tuner


class LimitTuner(Tuner):
    """Searches within a limit: before the first step by what stages hold and usual times, and once
    steps were measured again by theirs.

    Args:
        schedule: whose placement and number of microbatches are kept.
        groups: the trainer's process groups.
        limit: bytes that a rank may hold.
        fixed: this rank's bytes of parameters, gradients and optimizer state.
        peak: this rank's predicted peak of all else in a step of ``schedule``; None where a
            stage's graphs are not known.
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
        peak: Callable[[], int | None],
        links: Callable[[], Transfer],
        wiring: Wiring | None = None,
        early_weights: bool = False,
    ) -> None:
        super().__init__(schedule, groups, links=links, wiring=wiring, early_weights=early_weights)
        self.measured = schedule
        self._limit = limit
        self._fixed = fixed
        self._peak = peak
        self._rests: Sequence[float] = ()

    def before_step(self, stages: Mapping[int, TrainableStage]) -> Schedule:
        """What to run until steps are measured; collective.

        Raises:
            PipelineError: nothing keeps the limit; says the least that would do and of what.
        """
        costs = self._costs(stages)
        own: list[tuple[int, int | None]] = self._groups.gather((self._fixed(), self._peak()))
        peaks = peak_memory(self._schedule, costs.memory)
        # Of what is there besides microbatches: messages, and what calls need for themselves.
        self._rests = [
            fixed + max(0.0, (peak or 0) - held)
            for (fixed, peak), held in zip(own, peaks, strict=True)
        ]
        try:
            return self._found(costs)
        except ScheduleError as error:
            raise PipelineError(f"memory_limit: {error}") from error

    def after_step(
        self, spans: Sequence[Span], stages: Mapping[int, TrainableStage]
    ) -> Schedule | None:
        """As ``Tuner.after_step``."""
        self._steps.append(list(spans))
        if len(self._steps) <= MEASURED:
            return None
        try:
            return self._found(self._costs(stages))
        except ScheduleError:  # by measured times it is not kept: go on as it is
            return self.running

    def _found(self, costs: Costs) -> Schedule:
        found = search_within(
            costs,
            self._schedule.microbatches,
            self._limit,
            ranks=len(self._schedule.ranks),
            placement=self._schedule.placement,
            fixed=self._rests,
        )
        self.running = replace(found.schedule, crosses_step=False)
        return self.running
