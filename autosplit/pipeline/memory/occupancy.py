"""What a rank holds while it runs each action of its row, and of which microbatches."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.moves import TAKERS, journeys_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import changes_of, levels
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.timeline import Timeline

_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Held:
    """What one microbatch holds on a stage, from one compute action of its rank to another.

    Attributes:
        stage: whose it is.
        microbatch: of which microbatch.
        deferred: whether it is between I and W.
        made: the slot of the F, RECOMPUTE or I that makes it.
        used: that of the I, B or W that uses it.
        size: how much it is.
    """

    stage: int
    microbatch: int
    deferred: bool
    made: int
    used: int
    size: float


class Occupancy:
    """One rank's compute actions, called slots, in time and memory.

    Args:
        schedule: a legal one.
        costs: of every stage.
        timeline: the schedule's, with these costs.
        rank: whose.

    Attributes:
        places: per slot, its place in the row.
        kinds: per slot, what it runs.
        starts: per slot, when it starts.
        ends: per slot, when it ends.
        reached: per slot, when the rank comes to it, and to the moves that stand before it; it may
            wait then.
        level: per slot, what the rank holds while it runs.
        held: what can be moved or made again, in the order of the row.
    """

    def __init__(self, schedule: Schedule, costs: Costs, timeline: Timeline, rank: int) -> None:
        self.rank = rank
        row = schedule.ranks[rank]
        self.places = [place for place, action in enumerate(row) if action.kind.is_compute]
        self.kinds = [row[place].kind for place in self.places]
        spans = sorted(
            (s for s in timeline.spans if s.rank == rank and s.action.kind.is_compute),
            key=lambda span: (span.start, span.end),
        )
        times = {span.action: (span.start, span.end) for span in spans}
        self.starts = [times[row[place]][0] for place in self.places]
        self.ends = [times[row[place]][1] for place in self.places]
        self.reached = [0.0, *self.ends[:-1]]
        by_place = list(levels(row, changes_of(schedule, costs.memory)[rank]))
        self.level: list[float] = []
        done = -1
        for place in self.places:
            self.level.append(max(by_place[done + 1 : place + 1]))
            done = place
        self.held = self._held(schedule, costs)

    def _held(self, schedule: Schedule, costs: Costs) -> list[Held]:
        away = {
            (each.stage, each.microbatch, each.deferred)
            for each in journeys_of(schedule)
            if each.rank == self.rank
        }
        row = schedule.ranks[self.rank]
        made: dict[tuple[int, int], int] = {}
        found: list[Held] = []
        for slot, place in enumerate(self.places):
            action = row[place]
            key = action.stage, action.microbatch
            size = costs.memory[action.stage]
            deferred = action.kind is ActionKind.BACKWARD_WEIGHT
            makes = action.kind in (ActionKind.FORWARD, ActionKind.RECOMPUTE)
            if not makes and (*key, deferred) not in away:
                kept = size.deferred if deferred else size.saved
                found.append(Held(*key, deferred, made[key], slot, kept))
            made[key] = slot
        return found

    def most_held(self) -> int:
        """How many there are at once, at most, of what is held."""
        slots = range(len(self.kinds))
        return max((sum(h.made <= at <= h.used for h in self.held) for at in slots), default=0)

    def slot_at(self, moment: float) -> int:
        """The last slot that is reached by then."""
        return max(bisect_right(self.reached, moment + _TOLERANCE) - 1, 0)

    def before(self, slot: int, seconds: float, most: int) -> int:
        """The last slot up to ``most`` that is reached so long before ``slot`` starts."""
        if slot >= len(self.starts):
            return most
        moment = self.starts[slot] - seconds
        return min(bisect_right(self.reached, moment + _TOLERANCE) - 1, most)

    def waits(self, slot: int) -> float:
        """For how long the rank waits before a slot."""
        return self.starts[slot] - (self.ends[slot - 1] if slot else 0.0)

    def takes(self, slot: int) -> bool:
        """Whether a slot, if there is such, waits for what was sent away."""
        return slot < len(self.kinds) and self.kinds[slot] in TAKERS
