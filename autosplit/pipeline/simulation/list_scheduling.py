"""List scheduling: makes an order by playing a step graph in time.

A rank that is free starts what a policy chooses of what can start now, or waits. What comes of it
cannot deadlock: every action came after all that it needs. Policies depend on the time, so this
needs a clock. ``event_loop``, which plays given orders, does without: what that saves is in
``benchmarks/pipeline``, part "playing".
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from .step_graph import StepGraph

Choose = Callable[[int, float], int | None]
"""The number of the action that a free rank starts now, from rank and time; None to wait."""


class ListScheduler:
    """An order that is being made.

    Args:
        graph: the actions.
        seconds: per action.
        ranks: how many there are.

    Attributes:
        rows: per rank, the numbers of what it has started, in order.
        starts: per action, when it began.
        ends: per rank, when it ends what it has started.
    """

    def __init__(self, graph: StepGraph, seconds: Sequence[float], ranks: int) -> None:
        self._graph = graph
        self._seconds = seconds
        self.rows: list[list[int]] = [[] for _ in range(ranks)]
        self.starts = [-1.0] * len(seconds)
        self.ends = [0.0] * ranks
        self._arrivals = [math.inf] * len(graph.takers)

    def ready(self, action: int) -> float:
        """When all that ``action`` needs is there; infinite while some of it has not begun."""
        arrivals, latest = self._arrivals, 0.0
        for parcel in self._graph.needs[action]:
            if arrivals[parcel] > latest:
                latest = arrivals[parcel]
        return latest

    def run(self, choose: Choose) -> None:
        """Play until no rank has anything to start."""
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
            self.starts[action] = now
            ends[rank] = end = now + seconds[action]
            for parcel, link, took, latency in makes[action]:
                arrivals[parcel] = end
                if link is not None:
                    links[link] = max(end, links.get(link, 0.0)) + took
                    arrivals[parcel] = links[link] + latency
                if takers[parcel] != rank:
                    push(looks, (arrivals[parcel], takers[parcel]))
            push(looks, (end, rank))
