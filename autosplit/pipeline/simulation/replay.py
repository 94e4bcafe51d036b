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
from autosplit.pipeline.schedule.routes import needs_of, result_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds

from .event_loop import Play, play
from .lanes import add_lanes, free_way
from .step_graph import StepGraph


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that cannot go on: its next action needs a result that is not there.

    ``maker`` is the rank that would make the result and the action it stands at itself, or None
    when no rank makes it. Numbers from ``ranks`` on are lanes, which carry what moves.
    """

    rank: int
    action: Action
    needs: Action
    maker: tuple[int, Action] | None
    ranks: int

    def __str__(self) -> str:
        who = f"rank {self.rank} waits at {self.action}"
        if self.rank >= self.ranks:
            who = f"the transfer of {self.action} waits"
        text = f"{who} for {self.needs}, which "
        if self.maker is None:
            return text + "no rank runs"
        rank, standing = self.maker
        if rank >= self.ranks:
            behind = "" if standing == self.needs else f", behind {standing}"
            return text + f"has not been carried{behind}"
        return text + f"rank {rank} runs only after {standing}"


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
        schedule: any schedule; an illegal one stops where it stops. Links take no time, nor do
            transfers between partners or to the host.
        duration: seconds of an action.
        given: results to take as there from the start, though no rank makes them.

    Returns:
        The times of what ran and, for each rank that could not finish, what it waits for.
    """
    graph = StepGraph(schedule, given=given)
    seconds = [duration(action) for action in graph.actions]
    rows = rows_of(schedule)
    lanes = add_lanes(graph, schedule, rows, free_way)
    seconds += [0.0] * len(lanes.took)
    played = [*rows, *lanes.rows]
    run = play(graph, played, seconds)
    times = [
        [(run.starts[number], run.starts[number] + seconds[number]) for number in row[:place]]
        for row, place in zip(rows, run.places, strict=False)
    ]
    return Replay(times, waits_of(graph, played, run, len(rows)))


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


def waits_of(
    graph: StepGraph, rows: Sequence[Sequence[int]], run: Play, ranks: int
) -> dict[int, Wait]:
    """Why each unfinished rank, or lane behind the last of the ``ranks``, stands still."""
    left = {
        rank: list(row[place:])
        for rank, (row, place) in enumerate(zip(rows, run.places, strict=True))
        if place < len(row)
    }
    if not left:
        return {}
    there = {
        message.parcel
        for row, place in zip(rows, run.places, strict=True)
        for number in row[:place]
        for message in graph.makes[number]
    }
    makers = {
        message.parcel: rank
        for rank, numbers in left.items()
        for number in numbers
        for message in graph.makes[number]
    }
    waits = {}
    for rank, (standing, *_) in left.items():
        parcel = next(each for each in graph.needs[standing] if each not in there)
        maker = makers.get(parcel)
        at = None if maker is None else (maker, graph.actions[left[maker][0]])
        need = graph.parcels[parcel].result
        waits[rank] = Wait(rank, graph.actions[standing], need, at, ranks)
    return waits
