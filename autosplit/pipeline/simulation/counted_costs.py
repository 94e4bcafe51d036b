"""Costs for a search: steps are played on frames that are made once, and what is played counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.moves import Journey, journeys_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.rows.row_player import PlayedRows, RowPlayer

from .activation_memory import peak_memory
from .lanes import add_lanes, ways
from .simulate import run_step
from .step_costs import Costs
from .step_frame import StepFrame
from .timeline import Timeline


class _Place(NamedTuple):
    """What frames differ by."""

    placement: tuple[int, ...]
    mirror: tuple[int, ...] | None
    microbatches: int
    ranks: int


@dataclass
class Tally:
    """How much was played: schedules, and actions in them."""

    plays: int = 0
    actions: int = 0


@dataclass(frozen=True)
class CountedCosts(Costs):
    """The same costs, for many plays.

    Attributes:
        tally: what was played so far.
    """

    tally: Tally = field(default_factory=Tally, compare=False)
    _frames: dict[_Place, StepFrame] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _players: dict[int, RowPlayer] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, costs: Costs) -> CountedCosts:
        """These costs, nothing played yet."""
        return cls(**{each.name: getattr(costs, each.name) for each in fields(Costs)})

    def timeline(self, schedule: Schedule) -> Timeline:
        """As ``Costs.timeline``."""
        return self._timeline(schedule, None)

    def played(self, schedule: Schedule) -> tuple[Timeline, list[float]]:
        """Both ``timeline`` and ``peaks``. Raises what ``timeline`` does."""
        journeys = journeys_of(schedule)
        timeline = self._timeline(schedule, journeys)
        return timeline, peak_memory(schedule, self.memory, journeys)

    def rows_played(self, schedule: Schedule) -> PlayedRows | None:
        """How long a legal schedule takes, and what it holds; None if it deadlocks. Quick for one
        that shares rows with the last ones.
        """
        if self.early_weights:
            try:
                timeline, peaks = self.played(schedule)
            except ScheduleError:
                return None
            starts = {s.action: s.start for s in timeline.spans if s.action.kind.is_compute}
            return PlayedRows(timeline.makespan, starts, peaks)
        self.tally.plays += 1
        self.tally.actions += sum(map(len, schedule.ranks))
        return self._player(schedule).play(schedule)

    def rows_peaks(self, schedule: Schedule) -> list[float]:
        """As ``peaks`` of a legal schedule; counts for a quarter of a play, as it takes."""
        if self.early_weights:
            return peak_memory(schedule, self.memory)
        self.tally.actions += sum(map(len, schedule.ranks)) // 4
        return self._player(schedule).peaks(schedule)

    def _player(self, schedule: Schedule) -> RowPlayer:
        frame = self._frame(schedule)
        if id(frame) not in self._players:
            self._players[id(frame)] = RowPlayer(frame, self.memory, self.transfer)
        return self._players[id(frame)]

    def _timeline(self, schedule: Schedule, journeys: Sequence[Journey] | None) -> Timeline:
        self.tally.plays += 1
        self.tally.actions += sum(map(len, schedule.ranks))
        laid = self._frame(schedule).lay(schedule)
        if laid is None:
            return super().timeline(schedule)
        graph, rows, seconds = laid
        way = ways(schedule, self.transfer, self.memory)
        lanes = add_lanes(graph, schedule, rows, way, journeys, self.transfer.moves)
        seconds += [lanes.took[number] for number in range(len(seconds), len(graph.actions))]
        for number, more in lanes.spent.items():
            seconds[number] += more
        return run_step(
            schedule,
            graph,
            rows,
            lanes,
            seconds,
            early_weights=self.early_weights,
            slices=self.slices,
        )

    def peaks(self, schedule: Schedule, timeline: Timeline) -> list[float]:
        """Per rank, the most that it keeps by the order of its row, whatever transfers take."""
        return peak_memory(schedule, self.memory)

    def _frame(self, schedule: Schedule) -> StepFrame:
        place = _Place(
            schedule.placement, schedule.mirror, schedule.microbatches, len(schedule.ranks)
        )
        if place not in self._frames:
            if schedule.stages != len(self.times):
                raise ScheduleError(
                    f"schedule {schedule.name!r} has {schedule.stages} stages, but the costs are "
                    f"of {len(self.times)}"
                )
            feeds = None if self.wiring is None else Feeds(schedule.stages, self.wiring)
            self._frames[place] = StepFrame(
                schedule, self.seconds, feeds=feeds, transfer=self.transfer
            )
        return self._frames[place]
