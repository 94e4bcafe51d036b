"""All schedules for one pipeline, simulated side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tqdm import tqdm

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.schedule.schedule import Schedule, check_counts, check_size
from autosplit.pipeline.simulation.activation_memory import peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.timeline import Timeline

from .search import caps_of, forms

MOST = 200_000
"""Actions of a step, over all chunks: some twenty schedules of it take minutes and gigabytes."""

_ROUNDING = 1e-9  # of sums of what is kept
_SHORTEST, _LARGEST = 1e-30, 1e30  # in seconds and any unit of memory: beyond, sums lose digits


@dataclass(frozen=True)
class SimulatedSchedule:
    """One schedule of a survey.

    ``weights`` is the placement of W, ``"fused"`` or ``"own"``; ``peaks`` is the most each rank
    keeps.
    """

    name: str
    weights: str
    schedule: Schedule
    timeline: Timeline
    peaks: tuple[float, ...]

    @property
    def parts(self) -> int:
        """Into how many stages a rank's part of the model is cut."""
        return self.schedule.stages // len(self.schedule.ranks)


@dataclass(frozen=True)
class Survey:
    """The schedules that a pipeline admits, and why it does not admit the others, by name.

    ``cap`` is the most that a rank may keep, None for any.
    """

    entries: tuple[SimulatedSchedule, ...]
    refused: dict[str, str]
    cap: float | None = None

    @property
    def fitting(self) -> list[SimulatedSchedule]:
        """The entries that keep the cap."""
        return [entry for entry in self.entries if self.fits(entry)]

    def fits(self, entry: SimulatedSchedule) -> bool:
        """Whether no rank keeps more than the cap."""
        return self.cap is None or max(entry.peaks) <= self.cap * (1 + _ROUNDING)


def survey(
    costs: Costs,
    microbatches: int,
    *,
    chunks: int = 2,
    cap: float | None = None,
) -> Survey:
    """Simulate every schedule in every form. On a terminal a bar shows how far it is.

    Args:
        costs: of one stage a rank; where a schedule has several stages a rank, each is cut into as
            many equal ones.
        microbatches: M >= 1.
        chunks: stages a rank where the schedule leaves that open.
        cap: the most that a rank may keep; None: any.

    Raises:
        ScheduleError: a bad count, more than ``MOST`` actions, a step that takes no time or no
            finite one, or nothing found under the cap.
    """
    if chunks < 2:
        raise ScheduleError(f"chunks must be at least 2, got {chunks}")
    ranks = len(costs.times)
    _check(costs, microbatches, chunks, cap)
    entries: list[SimulatedSchedule] = []
    refused: dict[str, str] = {}
    # None: shown on a terminal, not in a log file.
    families = tqdm(SCHEDULES.items(), desc="simulating", unit="schedule", disable=None)
    for name, family in families:
        cut = costs.cut(family.chunks or chunks)
        try:
            for weights, schedule in forms(name, cut.times, microbatches, ranks):
                entries.append(_entry(name, weights, schedule, cut))
        except ScheduleError as error:
            refused[name] = str(error)
    if not entries:
        raise ScheduleError(next(iter(refused.values())))
    return Survey(tuple(entries), refused, cap)


def _check(costs: Costs, microbatches: int, chunks: int, cap: float | None) -> None:
    """Refuse, before anything is simulated, what would take too long or come to nothing."""
    ranks = len(costs.times)
    check_counts(microbatches=microbatches)
    check_size(ranks * chunks, microbatches, MOST)
    if cap is not None:
        caps_of(cap, ranks)
    work = microbatches * sum(map(sum, costs.times))
    kept = microbatches * sum(each.saved + each.deferred for each in costs.memory)
    if not (_SHORTEST < work < _LARGEST and kept < _LARGEST):
        raise ScheduleError(
            f"a step of {work:g} seconds of work in which {kept:g} is saved and deferred cannot be "
            f"compared with others: give times of which one at least is > 0, and neither more than "
            f"{_LARGEST:g} in all"
        )


def _entry(name: str, weights: str, schedule: Schedule, costs: Costs) -> SimulatedSchedule:
    timeline = costs.timeline(schedule)
    if not math.isfinite(timeline.makespan):
        raise ScheduleError(f"a step of {name!r} takes no finite time: give links that take less")
    return SimulatedSchedule(
        name, weights, schedule, timeline, tuple(peak_memory(schedule, costs.memory))
    )
