"""The order of a schedule, played through with the stages of many cuts at once.

The times are those of ``pipeline.simulate`` and the bytes those of ``pipeline.peak_memory``: the
order alone decides who waits for whom, so the simulator's core plays it once, and one pass over its
actions serves any number of cuts. What that saves is in ``benchmarks/planner``, part "playback".
"""

from __future__ import annotations

import torch
from torch import Tensor

from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.event_loop import play
from autosplit.pipeline.simulation.replay import rows_of
from autosplit.pipeline.simulation.step_graph import StepGraph
from autosplit.pipeline.simulation.transfer import Transfer

from .stage_costs import StageCosts

_CHANGES = {
    ActionKind.FORWARD: (1, 0),
    ActionKind.BACKWARD_INPUT: (-1, 1),
    ActionKind.BACKWARD_WEIGHT: (0, -1),
    ActionKind.BACKWARD: (-1, 0),
}
PLACES = {  # of times, the fourth of which is I + W
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 2,
    ActionKind.BACKWARD: 3,
}


class Order:
    """A legal schedule with one copy of its stages.

    Args:
        schedule: whose order it is.
        links: latency and bandwidth between ranks; its message bytes are not looked at, those of
            the cuts count.
        factor: bytes that a rank holds all the time for each byte of parameters.
    """

    def __init__(self, schedule: Schedule, links: Transfer, factor: float) -> None:
        self.schedule = schedule
        self._links = links
        self._factor = factor
        self.graph = StepGraph(schedule, own_needs=False)
        self._order = _order(self.graph, schedule)
        held = [torch.tensor(sorted(_states(schedule, rank))) for rank in range(self.ranks)]
        self._states = [each.to(torch.float64) for each in held]
        self._homes = torch.tensor(schedule.placement)

    @property
    def ranks(self) -> int:
        return len(self.schedule.ranks)

    @property
    def actions(self) -> int:
        """How many actions one pass goes over."""
        return len(self._order)

    def steps(self, stages: StageCosts) -> Tensor:
        """Seconds of a step, ranks waiting for each other at its end; shape [K]."""
        times = torch.cat([stages.times, stages.times[1:2] + stages.times[2:3]])
        zero = torch.zeros(stages.times.shape[2], dtype=torch.float64)
        clocks = [zero] * self.ranks
        links: dict[tuple[int, int], Tensor] = {}
        arrived: dict[int, Tensor] = {}
        graph = self.graph
        for number in self._order:
            action, rank = graph.actions[number], graph.ranks[number]
            start = clocks[rank]
            for parcel in graph.needs[number]:
                start = torch.maximum(start, arrived.pop(parcel))
            clocks[rank] = end = start + times[PLACES[action.kind], action.stage]
            for message in graph.makes[number]:
                arrived[message.parcel] = self._arrival(message.parcel, rank, end, links, stages)
        return torch.stack(clocks).amax(0)

    def _arrival(
        self,
        number: int,
        source: int,
        end: Tensor,
        links: dict[tuple[int, int], Tensor],
        stages: StageCosts,
    ) -> Tensor:
        """When a parcel is on the rank that waits for it; a link carries one after the other."""
        parcel, target = self.graph.parcels[number], self.graph.takers[number]
        if target == source:
            return end
        link = source, target
        latency, bandwidth = self._links.link(*link)
        if bandwidth != torch.inf:
            end = torch.maximum(end, links[link]) if link in links else end
            sizes = stages.crossing if parcel.forward else stages.returning
            end = end + sizes[parcel.boundary] / bandwidth
            links[link] = end
        return end + latency if latency else end

    def peaks(self, stages: StageCosts) -> Tensor:
        """The most that each rank holds at once, parameters and all; shape [P, K]."""
        kept = torch.cat([stages.kept[0], stages.kept[1]])
        moving = torch.stack([(states @ kept).amax(0) for states in self._states])
        still = torch.zeros_like(moving).index_add_(0, self._homes, stages.parameters)
        return moving + self._factor * still

    def states(self, rank: int) -> Tensor:
        """What a rank holds at its fullest moments: how many microbatches of each stage are saved,
        then how many are deferred; shape [moments, 2 S].
        """
        return self._states[rank]


def _order(graph: StepGraph, schedule: Schedule) -> list[int]:
    """The actions in an order in which each comes behind all that it needs."""
    starts = play(graph, rows_of(schedule), [1.0] * len(graph.actions)).starts
    return sorted(range(len(starts)), key=lambda number: (starts[number], graph.ranks[number]))


def _states(schedule: Schedule, rank: int) -> set[tuple[int, ...]]:
    """What lies between F and W at some moment.

    While an I runs, both what it reads and what it makes may be the larger, and so may be each
    moment before and behind it: the most over all moments is the same.
    """
    now = [0] * (2 * schedule.stages)
    found = {tuple(now)}
    for action in schedule.ranks[rank]:
        saved, deferred = _CHANGES[action.kind]
        now[action.stage] += saved
        now[schedule.stages + action.stage] += deferred
        found.add(tuple(now))
    return found
