"""Run the rank lists of any schedule, legal or not, until they end or nothing can move.

The simulator, the validator and the grid all stand on this, so they agree on what a schedule
waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate, pairwise

from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.dependency import needs_of, result_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds

from .event_loop import Play, play
from .step_graph import StepGraph


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


@dataclass(frozen=True)
class Replay:
    """How far a schedule came.

    Attributes:
        times: per rank, start and end of each action that ran, in order.
        waits: what each rank that could not finish waits for, the lowest rank first.
    """

    times: list[list[tuple[float, float]]]
    waits: dict[int, Wait]

    def cycles(self) -> Iterator[tuple[Wait, ...]]:
        """The circles of ranks that wait for each other, each once, from its lowest rank on."""
        seen: set[int] = set()
        for first in self.waits:
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
    given: AbstractSet[Action] = frozenset(),
) -> Replay:
    """Run every rank's actions in order, each as soon as its rank is free and its needs are met.

    Args:
        schedule: any schedule; an illegal one stops where it stops. Links take no time.
        duration: seconds of an action.
        given: results to take as there from the start, though no rank makes them.

    Returns:
        The times of what ran and, for each rank that could not finish, what it waits for.
    """
    graph = StepGraph(schedule, given=given)
    seconds = [duration(action) for action in graph.actions]
    rows = rows_of(schedule)
    run = play(graph, rows, seconds)
    times = [
        [(run.starts[number], run.starts[number] + seconds[number]) for number in row[:place]]
        for row, place in zip(rows, run.places, strict=True)
    ]
    return Replay(times, waits_of(graph, rows, run))


def rows_of(schedule: Schedule) -> list[range]:
    """Per rank, the numbers of its actions in the schedule's own step graph."""
    ends = [0, *accumulate(map(len, schedule.ranks))]
    return [range(first, last) for first, last in pairwise(ends)]


def unmade(schedule: Schedule) -> frozenset[Action]:
    """Results that some action of ``schedule`` needs and none makes."""
    feeds = Feeds(schedule.stages)
    actions = [action for row in schedule.ranks for action in row]
    made = {result_of(action) for action in actions}
    needed = {need for action in actions for need in needs_of(action, feeds)}
    return frozenset(needed - made)


def waits_of(graph: StepGraph, rows: Sequence[Sequence[int]], run: Play) -> dict[int, Wait]:
    """Why each unfinished rank stands still."""
    left = {
        rank: [graph.actions[number] for number in row[place:]]
        for rank, (row, place) in enumerate(zip(rows, run.places, strict=True))
        if place < len(row)
    }
    if not left:
        return {}
    ran = {
        result_of(graph.actions[number])
        for row, place in zip(rows, run.places, strict=True)
        for number in row[:place]
    }
    makers = {result_of(action): rank for rank, actions in left.items() for action in actions}
    waits = {}
    for rank, (standing, *_) in left.items():
        needs = graph.needs[rows[rank][run.places[rank]]]
        results = (graph.parcels[parcel].result for parcel in needs)
        need = next(result for result in results if result not in ran)
        maker = makers.get(need)
        at = None if maker is None else (maker, left[maker][0])
        waits[rank] = Wait(rank, standing, need, at)
    return waits
