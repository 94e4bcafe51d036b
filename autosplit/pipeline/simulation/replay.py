"""Run the rank lists of any schedule, legal or not, until they end or nothing can move.

The simulator, the validator and the grid all stand on this one loop, so they agree on what a
schedule waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.dependency import needs_of, result_of
from autosplit.pipeline.schedule.routes import Parcel
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds

from .arrivals import INSTANT, Arrivals
from .transfer import Transfer


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that cannot go on: its next action needs a result that is not there.

    ``maker`` is the rank that would make the result and the action it stands at itself, or None
    when no rank makes it.
    """

    rank: int
    action: Action
    needs: Action
    maker: tuple[int, Action] | None

    def __str__(self) -> str:
        text = f"rank {self.rank} waits at {self.action} for {self.needs}, which "
        if self.maker is None:
            return text + "no rank runs"
        return text + f"rank {self.maker[0]} runs only after {self.maker[1]}"


@dataclass
class Replay:
    """How far a schedule came.

    Attributes:
        times: per rank, start and end of each action that ran, in order.
        waits: what each rank that could not finish waits for.
        sent: by the ranks at both ends, what went over each link, in order; nothing where links
            take no time.
    """

    schedule: Schedule
    times: list[list[tuple[float, float]]] = field(default_factory=list)
    waits: dict[int, Wait] = field(default_factory=dict)
    sent: dict[tuple[int, int], list[Parcel]] = field(default_factory=dict)

    def cycles(self) -> Iterator[tuple[Wait, ...]]:
        """The circles of ranks that wait for each other, each once, from its lowest rank on."""
        seen: set[int] = set()
        for first in sorted(self.waits):
            path: list[int] = []
            rank: int | None = first
            while rank is not None and rank not in seen:
                seen.add(rank)
                path.append(rank)
                maker = self.waits[rank].maker
                rank = None if maker is None else maker[0]
            if rank in path:
                circle = path[path.index(rank) :]
                start = circle.index(min(circle))
                yield tuple(self.waits[each] for each in circle[start:] + circle[:start])


def replay(
    schedule: Schedule,
    duration: Callable[[Action], float],
    *,
    transfer: Transfer = INSTANT,
    feeds: Feeds | None = None,
    given: AbstractSet[Action] = frozenset(),
) -> Replay:
    """Run every rank's actions in order, each as soon as its rank is free and its needs are met.

    Args:
        schedule: any schedule; an illegal one stops where it stops.
        duration: seconds of an action.
        transfer: the links between ranks; sends never block.
        feeds: who feeds whom; None: each stage the next.
        given: results to take as there from the start, though no rank makes them.

    Returns:
        The times of what ran and, for each rank that could not finish, what it waits for.
    """
    run = Replay(schedule, [[] for _ in schedule.ranks])
    arrivals = Arrivals(schedule, transfer, feeds)
    blocked: dict[Action, list[int]] = {}
    clock = [0.0] * len(schedule.ranks)
    movable = list(range(len(schedule.ranks)))
    while movable:
        rank = movable.pop()
        row, times = schedule.ranks[rank], run.times[rank]
        while len(times) < len(row):
            action = row[len(times)]
            needs = [need for need in arrivals.needs(action) if need not in given]
            missing = next((need for need in needs if need not in arrivals.made), None)
            if missing is not None:
                blocked.setdefault(missing, []).append(rank)
                break
            start = max([clock[rank], *(arrivals.at(need, action.stage, rank) for need in needs)])
            clock[rank] = start + duration(action)
            times.append((start, clock[rank]))
            result = result_of(action)
            arrivals.add(result, rank, clock[rank])
            movable += blocked.pop(result, ())
    run.waits = _waits(schedule, run.times, blocked)
    run.sent = dict(arrivals.sent)
    return run


def unmade(schedule: Schedule) -> frozenset[Action]:
    """Results that some action of ``schedule`` needs and none makes."""
    actions = [action for row in schedule.ranks for action in row]
    made = {result_of(action) for action in actions}
    needed = {need for action in actions for need in needs_of(action, schedule.stages)}
    return frozenset(needed - made)


def _waits(
    schedule: Schedule,
    times: list[list[tuple[float, float]]],
    blocked: dict[Action, list[int]],
) -> dict[int, Wait]:
    """Why each unfinished rank stands still."""
    standing = {
        rank: row[len(times[rank])]
        for rank, row in enumerate(schedule.ranks)
        if len(times[rank]) < len(row)
    }
    makers = {
        result_of(action): rank
        for rank in standing
        for action in schedule.ranks[rank][len(times[rank]) :]
    }
    waits = {}
    for need, ranks in blocked.items():
        maker = makers.get(need)
        for rank in ranks:
            at = None if maker is None else (maker, standing[maker])
            waits[rank] = Wait(rank, standing[rank], need, at)
    return waits
