"""The simulator's core: run orders of actions through a step graph, and find why an order
deadlocks.

Every rank runs its row in order, each action as soon as the rank is free and its needs have
arrived. The orders alone decide which action waits for which, so ``play`` needs no clock: one rank
runs as far as it can, then the next rank does. The time is linear in the number of actions and
messages. The simulator, the validator and the grid all use ``play``, so they agree on waits.

``ListScheduler`` builds orders instead of following them, and needs a clock. ``global_order`` puts
the actions of all ranks in one order, from which ``recv_posting_order`` follows.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from autosplit.pipeline.schedule.routes import StageDataflow, outgoing_messages, result_of
from autosplit.pipeline.schedule.schedule import Action, Schedule

from .step_graph import Lanes, StepGraph, Transfer, add_lanes


class Play(NamedTuple):
    """The result of ``play``.

    Attributes:
        makespan: end of the last action, in seconds.
        starts: per action, its start in seconds; -1 if it did not run.
        places: per rank, how many actions of its row ran.
    """

    makespan: float
    starts: list[float]
    places: list[int]


def play(
    graph: StepGraph,
    rows: Sequence[Sequence[int]],
    seconds: Sequence[float],
) -> Play:
    """Run all rows until they end or no rank can run its next action.

    Args:
        graph: the actions.
        rows: per rank, the numbers of its actions in order.
        seconds: the duration of each action.
    """
    needs, makes, takers = graph.needs, graph.makes, graph.takers
    starts = [-1.0] * len(needs)
    ready = [-1.0] * len(takers)
    blocked = [False] * len(takers)
    links: dict[tuple[int, int], float] = {}
    places, clocks = [0] * len(rows), [0.0] * len(rows)
    movable = list(range(len(rows)))
    while movable:
        rank = movable.pop()
        row, place, now = rows[rank], places[rank], clocks[rank]
        for action in row[place:] if place else row:
            start = now
            for number in needs[action]:
                arrival = ready[number]
                if arrival < 0.0:
                    blocked[number] = True
                    break
                if arrival > start:
                    start = arrival
            else:
                starts[action] = start
                now = start + seconds[action]
                place += 1
                for number, link, took, latency in makes[action]:
                    if ready[number] >= 0.0:
                        continue
                    if link is None:
                        ready[number] = now
                    else:
                        free = links.get(link, 0.0)
                        links[link] = free = (free if free > now else now) + took
                        ready[number] = max(0.0, free + latency)
                    if blocked[number]:
                        movable.append(takers[number])
                        blocked[number] = False
                continue
            break
        places[rank], clocks[rank] = place, now
    return Play(max(clocks, default=0.0), starts, places)


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that cannot continue, because its next action needs a result that does not exist.

    Attributes:
        rank: the number of the rank; ``ranks`` and larger numbers are lanes of moves.
        action: the rank's next action.
        needs: the missing result.
        maker: (rank that would compute the result, that rank's next action); None if no rank
            computes it.
        ranks: the number of ranks.
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
            queued = "" if standing == self.needs else f", behind {standing}"
            return text + f"has not been carried{queued}"
        return text + f"rank {rank} runs only after {standing}"


@dataclass(frozen=True)
class Replay:
    """The result of ``replay``: how far a schedule ran.

    Attributes:
        times: per rank, (start, end) of each action that ran, in order.
        waits: the wait of each rank that could not finish, the lowest rank first.
    """

    times: list[list[tuple[float, float]]]
    waits: dict[int, Wait]

    def cycles(self) -> Iterator[tuple[Wait, ...]]:
        """Yield each cycle of ranks that wait for each other, once, from its lowest rank on."""
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
                yield tuple(self.waits[rank] for rank in circle[start:] + circle[:start])


def replay(schedule: Schedule) -> Replay:
    """Run every rank's actions in order, each as soon as its rank is free and its needs are met.

    Args:
        schedule: any schedule; an illegal schedule may stop early. Each action takes 1 second;
            links and transfers take no time. Results that no rank computes exist from the start.

    Returns:
        The times of the actions that ran, and the wait of each rank that could not finish.
    """
    graph = StepGraph(schedule)
    graph.needs = [
        tuple([number for number in needs if graph.makers[number] >= 0]) for needs in graph.needs
    ]
    seconds = [1.0] * len(graph.actions)
    rows = rows_of(schedule)
    lanes = add_lanes(graph, schedule, rows, seconds)
    run = play(graph, lanes.rows, seconds)
    times = [
        [(run.starts[number], run.starts[number] + 1.0) for number in row[:place]]
        for row, place in zip(rows, run.places, strict=False)
    ]
    return Replay(times, waits_of(lanes, run))


def rows_of(schedule: Schedule) -> list[range]:
    """The numbers of each rank's actions in the schedule's step graph."""
    ends = [0, *accumulate(map(len, schedule.ranks))]
    return [range(first, last) for first, last in pairwise(ends)]


def waits_of(lanes: Lanes, run: Play) -> dict[int, Wait]:
    """The wait of each unfinished rank, and of each lane; lanes are numbered after the ranks."""
    graph, rows = lanes.graph, lanes.rows
    left = {
        rank: list(row[place:])
        for rank, (row, place) in enumerate(zip(rows, run.places, strict=True))
        if place < len(row)
    }
    if not left:
        return {}
    arrived = {
        message.number
        for row, place in zip(rows, run.places, strict=True)
        for number in row[:place]
        for message in graph.makes[number]
    }
    makers = {
        message.number: rank
        for rank, numbers in left.items()
        for number in numbers
        for message in graph.makes[number]
    }
    waits = {}
    for rank, (standing, *_) in left.items():
        missing = next(number for number in graph.needs[standing] if number not in arrived)
        maker = makers.get(missing)
        at = None if maker is None else (maker, graph.actions[left[maker][0]])
        need = graph.stage_messages[missing].result
        waits[rank] = Wait(rank, graph.actions[standing], need, at, lanes.ranks)
    return waits


_COMPUTED, _TRAVELS = 10.0, Transfer(latency=1.0)
"""Durations of an action and of a message; whole numbers, so that all ranks agree exactly."""


def global_order(schedule: Schedule, dataflow: StageDataflow) -> list[tuple[int, Action]]:
    """(rank, action) of all actions of a step, in the order of their starts if all took equally
    long.

    Every action comes after its needs. Actions that a deadlock blocks are left out.
    """
    graph, rows = StepGraph(schedule, dataflow=dataflow, transfer=_TRAVELS), rows_of(schedule)
    run = play(graph, rows, [_COMPUTED * action.kind.is_compute for action in graph.actions])
    ran = [number for row, end in zip(rows, run.places, strict=True) for number in row[:end]]
    ran.sort(key=run.starts.__getitem__)
    return [(graph.ranks[number], graph.actions[number]) for number in ran]


def recv_posting_order(
    schedule: Schedule, dataflow: StageDataflow
) -> list[dict[Action, tuple[int, ...]]]:
    """For each rank, maps an action to the peers from which the next receives are posted before it.

    A send starts when its message is computed. Its receive is posted next to the send in the global
    order of all actions. So every queue keeps the global order, and messages cannot deadlock
    whichever queues they share, even a single one. The order is by time, so a receive is posted
    while its message is computed, not after the next action of its rank.
    """
    posts: list[dict[Action, tuple[int, ...]]] = [{} for _ in schedule.ranks]
    coming: list[list[int]] = [[] for _ in schedule.ranks]
    for maker, action in global_order(schedule, dataflow):
        if action.kind.is_compute:
            posts[maker][action] = tuple(coming[maker])
            coming[maker].clear()
        for message in outgoing_messages(result_of(action), dataflow):
            taker = schedule.placement[message.stage]
            if taker != maker:
                coming[taker].append(maker)
    return posts


Choose = Callable[[int, float], int | None]
"""Maps a free rank and the time to the number of the action to start; None to wait."""


class ListScheduler:
    """Builds an order of actions by running a step graph in time.

    A free rank starts the action that a policy chooses among those that can start now, or waits.
    The resulting order cannot deadlock, because every action came after its needs. Policies depend
    on the time, so a clock is needed. ``play`` needs none, and takes a quarter of the time.

    Args:
        graph: the actions.
        seconds: the duration of each action.
        ranks: the number of ranks.

    Attributes:
        rows: per rank, the numbers of the actions that it has started, in order.
        ends: per rank, the end of its last action, in seconds.
    """

    def __init__(self, graph: StepGraph, seconds: Sequence[float], ranks: int) -> None:
        self._graph = graph
        self._seconds = seconds
        self.rows: list[list[int]] = [[] for _ in range(ranks)]
        self.ends = [0.0] * ranks
        self._arrivals = [math.inf] * len(graph.takers)

    def ready(self, action: int) -> float:
        """The second at which all results that ``action`` needs have arrived; infinite while an
        action that computes one of these results has not started.
        """
        arrivals, latest = self._arrivals, 0.0
        for number in self._graph.needs[action]:
            if arrivals[number] > latest:
                latest = arrivals[number]
        return latest

    def run(self, choose: Choose) -> None:
        """Run until no rank has an action to start."""
        makes, takers, arrivals = self._graph.makes, self._graph.takers, self._arrivals
        ends, seconds, pop, push = self.ends, self._seconds, heapq.heappop, heapq.heappush
        links: dict[tuple[int, int], float] = {}
        # A rank looks for work when it begins, ends an action, or gets a message.
        looks = [(0.0, rank) for rank in range(len(self.rows))]
        while looks:
            now, rank = pop(looks)
            if ends[rank] > now:
                continue
            action = choose(rank, now)
            if action is None:
                continue
            self.rows[rank].append(action)
            ends[rank] = end = now + seconds[action]
            for number, link, took, latency in makes[action]:
                arrivals[number] = end
                if link is not None:
                    links[link] = max(end, links.get(link, 0.0)) + took
                    arrivals[number] = links[link] + latency
                taker, arrival = takers[number], arrivals[number]
                if taker != rank and ends[taker] <= arrival:  # else it looks at its end
                    push(looks, (arrival, taker))
            push(looks, (end, rank))
