"""The simulator's core: plays given orders through a step graph.

Every rank runs its row in order, each action as soon as the rank is free and its needs have
arrived. Who waits for whom follows from the order alone, so no clock is needed: a rank runs as far
as it can, then the next one does. The time is linear in the number of actions and messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .early_weights import EarlyWeights
from .step_graph import Seconds, StepGraph

_TOLERANCE = 1e-9  # seconds; a shorter wait is what rounding leaves


class Play(NamedTuple):
    """How an order ran.

    Attributes:
        makespan: when the last action ended.
        starts: per action, when it began; -1 for what did not run.
        causes: per action, the parcel that it waited for; -1 if its rank was busy until then.
        last: the rank that ended last.
        places: per rank, how many actions of its row ran.
        early: per rank, where Ws run in waits, what it ran and when.
    """

    makespan: float
    starts: list[float]
    causes: list[int]
    last: int
    places: list[int]
    early: list[EarlyWeights]


def play(
    graph: StepGraph,
    rows: Sequence[Sequence[int]],
    seconds: Seconds,
    early: Sequence[EarlyWeights] = (),
) -> Play:
    """Run every row until it ends or nothing can move.

    Args:
        graph: the actions.
        rows: per rank, the numbers of its actions in order.
        seconds: asked for as actions run.
        early: per rank, the Ws that run in its waits, all of which take no seconds in their place;
            empty: Ws run where the rows have them.
    """
    needs, makes, takers, sending = graph.needs, graph.makes, graph.takers, graph.sending
    starts, causes = [-1.0] * len(needs), [-1] * len(needs)
    ready = [-1.0] * len(takers)
    blocked = [False] * len(takers)
    links: dict[tuple[int, int], float] = {}
    places, clocks = [0] * len(rows), [0.0] * len(rows)
    movable = list(range(len(rows)))
    while movable:
        rank = movable.pop()
        row, place, now = rows[rank], places[rank], clocks[rank]
        for action in row[place:] if place else row:
            start, cause = now, -1
            for parcel in needs[action]:
                arrival = ready[parcel]
                if arrival < 0.0:
                    blocked[parcel] = True
                    break
                if arrival > start:
                    if arrival > start + _TOLERANCE:
                        cause = parcel
                    start = arrival
            else:
                if early:
                    filled = early[rank].fill(action, now, start, starts)
                    if filled > start:
                        start, cause = filled, -1
                if starts[action] < 0.0:  # else a W that began in a wait
                    starts[action], causes[action] = start, cause
                now = start + seconds[action]
                place += 1
                for parcel, link, took, latency in makes[action]:
                    if ready[parcel] >= 0.0:
                        continue
                    if link is None:
                        ready[parcel] = now
                    else:
                        free = links.get(link, 0.0)
                        links[link] = free = (free if free > now else now) + took
                        ready[parcel] = free + latency
                    if blocked[parcel]:
                        movable.append(takers[parcel])
                        blocked[parcel] = False
                now += sending[action]
                continue
            break
        places[rank], clocks[rank] = place, now
    makespan = max(clocks, default=0.0)
    return Play(
        makespan, starts, causes, clocks.index(makespan) if clocks else -1, places, [*early]
    )
