"""Apply a memory remedy to one rank, or pair of ranks, after another, until no rank holds more than
its bound.

A remedy is balancing, offloading or recomputing (``REMEDIES`` in ``remedies``). It proposes
schedules with added actions. The order of a row alone decides how much a rank holds
(``peak_memory``), however long transfers take. Of the proposals that keep the bound, the one with
the shortest step is taken.

A few placement rules (``PlacementRule``) say where activations leave and come back; all are tried.
By some rules a rank waits until a departure has ended. Then the departing tensors never count
together with those of the next computation, but nothing overlaps with the transfer.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import NamedTuple

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.moves import ALLOCATING, find_moves
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import (
    ROUNDING,
    StageMemory,
    levels_of,
    peak_memory,
)
from autosplit.pipeline.simulation.simulate import Costs, Timeline

MemoryRemedy = Callable[[Schedule, Costs, Sequence[float]], Schedule]
"""Brings the ranks of a schedule below their bounds, or as near to that as it can."""

_CLOCK_ERROR = 1e-9  # seconds by which two equal moments may differ


# --- one rank's compute actions in time and memory ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Residency:
    """The activations of one microbatch on a stage, from one compute action of the rank to another.

    Attributes:
        stage: the stage that computed the activations.
        microbatch: the microbatch.
        deferred: True between I and W, False between F and the backward.
        first: the slot of the F, RECOMPUTE or I that computes the activations.
        last: the slot of the I, B or W that uses the activations.
        size: the memory of the activations, in the unit of the costs.
    """

    stage: int
    microbatch: int
    deferred: bool
    first: int
    last: int
    size: float


class RankTimeline:
    """One rank's compute actions, called slots, in time and memory.

    Args:
        schedule: a legal schedule.
        costs: the costs of every stage.
        timeline: the simulated timeline of the schedule with these costs.
        rank: the rank.

    Attributes:
        places: per slot, the place of its action in the row.
        kinds: per slot, the kind of its action.
        starts: per slot, the second at which it starts.
        reached: per slot, the second at which the rank reaches the slot and the moves before it;
            the slot may start later.
        level: per slot, the most memory that the rank holds during the slot and at the moves before
            the slot.
        residencies: activations that can be moved or recomputed, in the order of their use.
    """

    def __init__(self, schedule: Schedule, costs: Costs, timeline: Timeline, rank: int) -> None:
        self.rank = rank
        row = schedule.ranks[rank]
        self.places = [place for place, action in enumerate(row) if action.kind.is_compute]
        self.kinds = [row[place].kind for place in self.places]
        spans = {span.action: span for span in timeline.spans if span.rank == rank}
        slots = [spans[row[place]] for place in self.places]
        self.starts = [span.start for span in slots]
        self.reached = [0.0, *(span.end for span in slots[:-1])]
        levels = list(levels_of(schedule, costs.memory)[rank])
        ends = [0, *(place + 1 for place in self.places)]
        self.level = [max(levels[start:end]) for start, end in pairwise(ends)]
        self.residencies = self._residencies(schedule, costs.memory)

    def _residencies(self, schedule: Schedule, memory: Sequence[StageMemory]) -> list[Residency]:
        row = schedule.ranks[self.rank]
        moved = {
            (move.stage, move.microbatch, move.deferred)
            for move in find_moves(schedule)
            if move.rank == self.rank
        }
        first: dict[tuple[int, int], int] = {}
        residencies: list[Residency] = []
        for slot, place in enumerate(self.places):
            action = row[place]
            key, size = (action.stage, action.microbatch), memory[action.stage]
            deferred = action.kind is ActionKind.BACKWARD_WEIGHT
            if action.kind not in ALLOCATING and (*key, deferred) not in moved:
                kept = size.deferred if deferred else size.saved
                residencies.append(Residency(*key, deferred, first[key], slot, kept))
            first[key] = slot
        return residencies

    def idle_seconds(self, slot: int) -> float:
        """Seconds that the rank waits before a slot."""
        return self.starts[slot] - self.reached[slot]

    def slot_at(self, moment: float) -> int:
        """The last slot that the rank has reached at a moment, in seconds."""
        return max(bisect_right(self.reached, moment + _CLOCK_ERROR) - 1, 0)


# --- placement and insertion of actions -----------------------------------------------------------


Insertions = Sequence[tuple[RankTimeline, Sequence[tuple[int, Action]]]]
"""Further actions of each rank's row, each with the slot directly before which it stands."""


class PlacementRule(NamedTuple):
    """A rule for the slots before which a window's departure and arrival are inserted.

    Attributes:
        lead: the number of compute actions between the arrival and the use.
        waits: whether the rank waits until the departure has ended.
        slack: how late a partner may be, as a fraction of the shortest action.
    """

    lead: int
    waits: bool = False
    slack: float = 0.0


@dataclass(frozen=True, slots=True)
class OffloadWindow:
    """The slots during which one microbatch's activations are not on their rank.

    Attributes:
        residency: the activations that leave their rank.
        out: the slot before which the departure is inserted.
        gone: the slot before which the departure has always ended, because the next allocation
            waits for the departure.
        arrival: the slot before which the arrival is inserted.
        awaited: whether the rank waits until the departure has ended.
    """

    residency: Residency
    out: int
    gone: int
    arrival: int
    awaited: bool = False

    @property
    def slots(self) -> range:
        """The slots during which the activations do not count on their rank."""
        return range(self.out if self.awaited else self.gone, self.arrival)

    def action(self, kind: ActionKind) -> Action:
        """An action of this kind for the window's stage and microbatch."""
        return Action(self.residency.stage, kind, self.residency.microbatch)


def offload_windows(
    timeline: RankTimeline, rule: PlacementRule, overlap: int
) -> list[OffloadWindow]:
    """A window for each of a rank's residencies that can move, placed by a rule.

    Args:
        timeline: the rank's compute actions.
        rule: the placement rule.
        overlap: the number of compute actions that run beside a departure before an arrival waits
            for the departure.
    """
    placements = [(r, r.first + 1, r.last - rule.lead) for r in timeline.residencies]
    arrivals = {arrival for _, _, arrival in placements}
    windows = []
    for residency, out, arrival in placements:
        gone = (
            slot
            for slot in range(out, arrival)
            if (slot > out and timeline.kinds[slot] in ALLOCATING)
            or (slot >= out + overlap and slot in arrivals)
        )
        window = OffloadWindow(residency, out, next(gone, arrival), arrival, rule.waits)
        windows += [window] if window.slots else []
    return windows


def necessary_windows(
    level: Sequence[float],
    bound: float,
    windows: Sequence[OffloadWindow],
    size: Callable[[Residency], float] = attrgetter("size"),
) -> list[OffloadWindow]:
    """The windows that a rank needs to keep its bound. Windows, and waits for departures, that the
    rank can do without are dropped.

    Args:
        level: per slot, the memory that the rank holds without any window.
        bound: the most memory that the rank may hold.
        windows: candidates; an earlier candidate is dropped before a later one.
        size: a function that returns the memory that a window of a residency frees.
    """
    remaining, needed = [*level], []
    for window in windows:
        for slot in window.slots:
            remaining[slot] -= size(window.residency)
    for window in windows:
        more = size(window.residency)
        relaxations: list[tuple[range, OffloadWindow | None]] = [(window.slots, None)]
        if window.awaited:
            unawaited = replace(window, awaited=False)
            relaxations.append((range(window.out, window.gone), unawaited))
        for span, relaxed in relaxations:
            if all(remaining[slot] + more <= bound * ROUNDING for slot in span):
                for slot in span:
                    remaining[slot] += more
                needed += [relaxed] if relaxed else []
                break
        else:
            needed.append(window)
    return needed


def insert_actions(schedule: Schedule, insertions: Insertions) -> Schedule:
    """The schedule with ``insertions`` added to its rows."""
    rows = list(schedule.ranks)
    for timeline, actions in insertions:
        inserted: dict[int, list[Action]] = defaultdict(list)
        for slot, action in actions:
            inserted[timeline.places[slot]].append(action)
        row: list[Action] = []
        for place, action in enumerate(rows[timeline.rank]):
            row += [*inserted[place], action]
        rows[timeline.rank] = tuple(row)
    return replace(schedule, ranks=tuple(rows))


# --- ranks within bounds --------------------------------------------------------------------------


def bring_below(
    schedule: Schedule,
    costs: Costs,
    bounds: Sequence[float],
    groups: Iterable[Sequence[int]],
    propose: Callable[[Schedule, Sequence[RankTimeline]], Iterator[Schedule]],
) -> Schedule:
    """Change one group of ranks after another. Each group is changed until its ranks keep their
    bounds or come as near as possible.

    Args:
        schedule: a legal schedule.
        costs: the costs of every stage.
        bounds: the most memory that each rank may hold, by rank.
        groups: ranks that are changed together.
        propose: yields schedules to try for a group in which a rank exceeds its bound. Proposals
            that deadlock are skipped; the smallest excess wins, then the shortest step.
    """
    timeline = costs.timeline(schedule)

    def scored(proposal: Schedule) -> Iterator[tuple[float, float, Schedule, Timeline]]:
        with contextlib.suppress(ScheduleError):
            proposed = costs.timeline(proposal)
            peaks = peak_memory(proposal, costs.memory)
            excess = max(0.0, *(peaks[rank] - bounds[rank] * ROUNDING for rank in ranks))
            yield excess, proposed.step_time, proposal, proposed

    for ranks in groups:
        sides = [RankTimeline(schedule, costs, timeline, rank) for rank in ranks]
        if any(max(side.level) > bounds[side.rank] * ROUNDING for side in sides):
            scores = (score for p in propose(schedule, sides) for score in scored(p))
            best = min(scores, key=itemgetter(0, 1), default=None)
            if best is not None:
                *_, schedule, timeline = best
    return schedule


def single_ranks(schedule: Schedule) -> list[tuple[int]]:
    """Every rank as a group of its own."""
    return [(rank,) for rank in range(len(schedule.ranks))]


def caps_of(cap: float | Sequence[float], ranks: int) -> tuple[float, ...]:
    """One cap for each rank.

    Raises:
        ScheduleError: the number of caps is not the number of ranks, or a cap is below 0.
    """
    caps = tuple(cap) if isinstance(cap, Sequence) else (cap,) * ranks
    if len(caps) != ranks or not all(number >= 0 for number in caps):
        raise ScheduleError(
            f"a memory limit is a number >= 0, or a list with a number for each of {ranks} ranks; "
            f"got {cap!r}"
        )
    return caps


def keep_limit(
    doing: str,
    remedy: MemoryRemedy,
    schedule: Schedule,
    costs: Costs,
    limit: float | Sequence[float],
) -> Schedule:
    """Apply a remedy to a schedule, and refuse the result if it exceeds the limit.

    Raises:
        ScheduleError: a rank stays above the limit; the text names the rank, and a limit that the
            remedy can keep.
    """
    bounds = caps_of(limit, len(schedule.ranks))
    least: Sequence[float] = bounds
    remedied = remedy(schedule, costs, bounds)
    first = peaks = peak_memory(remedied, costs.memory)
    while any(peak > bound * ROUNDING for peak, bound in zip(peaks, least, strict=True)):
        # With another bound, another schedule may hold more.
        least = [*map(max, least, peaks)]
        if not isinstance(limit, Sequence):
            least = [max(least)] * len(least)
        peaks = peak_memory(remedy(schedule, costs, least), costs.memory)
    for rank, (peak, bound) in enumerate(zip(first, bounds, strict=True)):
        if peak > bound * ROUNDING:
            advised = [float(f"{bound:.12g}") for bound in least]
            raise ScheduleError(
                f"{doing} leaves rank {rank} of {schedule.name!r} with a peak memory of {peak:g}, "
                f"above its limit of {bound:g} (in the unit of costs.memory): raise the limit to "
                f"{advised if isinstance(limit, Sequence) else advised[0]}, take another remedy as "
                "well (balance, offload, recompute), or cut the batch into smaller microbatches"
            )
    return remedied
