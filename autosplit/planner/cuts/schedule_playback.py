"""The order of a schedule, played through with the stages of many cuts at once.

The times are those of ``pipeline.simulate`` and the bytes those of ``pipeline.peak_memory``: the
order alone decides who waits for whom, so the simulator's core plays it once, and one pass over its
actions serves any number of cuts. What that saves is in ``benchmarks/planner``, part "playback".
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autosplit.pipeline.schedule.action import Action, ActionKind
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

_TOGETHER = 512  # ways to cut that are played through at once
_ROUNDING = 1 + 1e-9


class _Send(NamedTuple):
    """A parcel that an action sends on.

    Attributes:
        parcel: its number.
        link: the ranks at both ends; None where it does not keep a link, on its own rank or where
            links carry all at once.
        latency: seconds to its arrival behind what keeps the link.
        forward: whether it goes to a later stage.
        boundary: the cut that it crosses.
        bandwidth: of the link.
    """

    parcel: int
    link: tuple[int, int] | None
    latency: float
    forward: bool
    boundary: int
    bandwidth: float


class _Turn(NamedTuple):
    """An action in its turn: rank, place of its seconds, stage, the parcels it takes and sends."""

    rank: int
    place: int
    stage: int
    needs: tuple[int, ...]
    sends: tuple[_Send, ...]


class Order:
    """A legal schedule with one copy of its stages.

    Args:
        schedule: whose order it is.
        links: latency and bandwidth between ranks; its message bytes are not looked at, those of
            the cuts count.
        factor: bytes that a rank holds all the time for each byte of parameters.

    Attributes:
        played: actions that ``least`` played so far.
    """

    def __init__(self, schedule: Schedule, links: Transfer, factor: float) -> None:
        self.schedule = schedule
        self.played = 0
        self._factor = factor
        graph = StepGraph(schedule, own_needs=False)
        self._turns = [_turn(graph, number, links) for number in _order(graph, schedule)]
        self._own: list[list[int]] = [[] for _ in schedule.ranks]
        for stage, rank in enumerate(schedule.placement):
            self._own[rank].append(stage)
        self._held = [
            torch.tensor(_fullest(row, own), dtype=torch.float64)
            for row, own in zip(schedule.ranks, self._own, strict=True)
        ]
        self._homes = torch.tensor(schedule.placement)

    @property
    def ranks(self) -> int:
        return len(self.schedule.ranks)

    @property
    def actions(self) -> int:
        """How many actions one pass goes over."""
        return len(self._turns)

    def steps(self, stages: StageCosts) -> Tensor:
        """Seconds of a step, ranks waiting for each other at its end; shape [K]."""
        times = torch.cat([stages.times, stages.times[1:2] + stages.times[2:3]])
        sizes = stages.returning, stages.crossing
        if times.shape[2] == 1:  # numbers are quicker than tensors of one
            numbers = [each[..., 0].tolist() for each in (times, *sizes)]
            ends = self._play(0.0, numbers[0], numbers[1:], max)
            return torch.tensor([max(ends)], dtype=torch.float64)
        rows = [place.unbind() for place in times]
        zero = torch.zeros(times.shape[2], dtype=torch.float64)
        ends = self._play(zero, rows, [each.unbind() for each in sizes], torch.maximum)
        return torch.stack(ends).amax(0)

    def _play(
        self,
        zero: Any,
        times: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[Any]],
        later: Callable[[Any, Any], Any],
    ) -> list[Any]:
        """When each rank ends; for one way to cut in numbers, for many in tensors."""
        clocks = [zero] * self.ranks
        links: dict[tuple[int, int], Any] = {}
        arrived: dict[int, Any] = {}
        for rank, place, stage, needs, sends in self._turns:
            start = clocks[rank]
            for parcel in needs:
                start = later(start, arrived.pop(parcel))
            clocks[rank] = end = start + times[place][stage]
            for parcel, link, latency, forward, boundary, bandwidth in sends:
                arrival = end
                if link is not None:  # which carries one after the other
                    arrival = later(end, links[link]) if link in links else end
                    arrival = arrival + sizes[forward][boundary] / bandwidth
                    links[link] = arrival
                arrived[parcel] = arrival + latency if latency else arrival
        return clocks

    def bounds(self, stages: StageCosts) -> Tensor:
        """Seconds below which no step of this kind can be; shape [K].

        A rank begins when the Fs before its first stage are done. It then has all its work to do;
        and behind the last of its gradients come those of the stages before, and the first's W.
        """
        forward, inputs, weights = stages.times
        backward = inputs if self.schedule.split_backward else inputs + weights
        last = weights[0] if self.schedule.split_backward else 0.0
        count = self.schedule.microbatches
        lead, tail = forward.cumsum(0) - forward, backward.cumsum(0) - backward
        bounds = []
        for own in self._own:
            first = own[0] if own else 0
            urgent = count * (forward[own] + backward[own]).sum(0) + tail[first] + last
            work = count * stages.times[:, own].sum((0, 1))
            bounds.append(lead[first] + torch.maximum(work, urgent))
        return torch.stack(bounds).amax(0) if bounds else torch.zeros_like(forward[0])

    def least(self, stages: StageCosts, ways: Tensor) -> Tensor:
        """Seconds of a step of these of the ways, shape [K], as far as the shortest goes: infinite
        for other ways, and for those that are longer for sure.
        """
        found = torch.full((stages.times.shape[2],), torch.inf, dtype=torch.float64)
        bounds = self.bounds(stages)
        left = ways[bounds[ways].argsort(stable=True)]
        while len(left):
            some, left = left[:_TOGETHER], left[_TOGETHER:]
            found[some] = self.steps(stages.of(some))
            self.played += self.actions
            left = left[bounds[left] <= found.min() * _ROUNDING]
        return found

    def peaks(self, stages: StageCosts) -> Tensor:
        """The most that each rank holds at once, parameters and all; shape [P, K]."""
        moving = torch.stack(
            [
                (held @ stages.kept[:, own].flatten(0, 1)).amax(0)
                for held, own in zip(self._held, self._own, strict=True)
            ]
        )
        still = torch.zeros_like(moving).index_add_(0, self._homes, stages.parameters)
        return moving + self._factor * still

    def held(self, stage: int) -> Tensor:
        """How many microbatches of a stage its rank has saved, and deferred, at its fullest
        moments; shape [moments, 2].
        """
        rank = self.schedule.placement[stage]
        own = self._own[rank]
        at = own.index(stage)
        return self._held[rank][:, [at, len(own) + at]]


def _turn(graph: StepGraph, number: int, links: Transfer) -> _Turn:
    action, rank = graph.actions[number], graph.ranks[number]
    sends = []
    for message in graph.makes[number]:
        parcel, target = graph.parcels[message.parcel], graph.takers[message.parcel]
        link, latency, bandwidth = None, 0.0, torch.inf
        if target != rank:
            latency, bandwidth = links.link(rank, target)
            link = (rank, target) if bandwidth != torch.inf else None
        sends.append(
            _Send(message.parcel, link, latency, parcel.forward, parcel.boundary, bandwidth)
        )
    return _Turn(rank, PLACES[action.kind], action.stage, graph.needs[number], tuple(sends))


def _order(graph: StepGraph, schedule: Schedule) -> list[int]:
    """The actions in an order in which each comes behind all that it needs."""
    starts = play(graph, rows_of(schedule), [1.0] * len(graph.actions)).starts
    return sorted(range(len(starts)), key=lambda number: (starts[number], graph.ranks[number]))


def _fullest(row: Sequence[Action], own: Sequence[int]) -> list[tuple[int, ...]]:
    """What a rank holds at its fullest moments, between F and W: how many microbatches of each of
    its stages are saved, then how many are deferred. Moments that hold no more of anything than
    another are left out.

    While an I runs, both what it reads and what it makes may be the larger, and so may be each
    moment before and behind it: the most over all moments is the same.
    """
    places = {stage: at for at, stage in enumerate(own)}
    now = [0] * (2 * len(own))
    found = {tuple(now)}
    for action in row:
        saved, deferred = _CHANGES[action.kind]
        now[places[action.stage]] += saved
        now[len(own) + places[action.stage]] += deferred
        found.add(tuple(now))
    kept: list[tuple[int, ...]] = []
    for each in sorted(found, key=sum, reverse=True):
        if not any(all(map(operator.ge, other, each)) for other in kept):
            kept.append(each)
    return kept
