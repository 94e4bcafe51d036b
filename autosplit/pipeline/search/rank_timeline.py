"""One rank's compute actions in time and memory, as memory remedies read them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autosplit.pipeline.schedule.moves import ALLOCATING, find_moves
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory, levels_of
from autosplit.pipeline.simulation.simulate import Costs, Timeline

_CLOCK_ERROR = 1e-9  # seconds by which two equal moments may differ


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
