"""The order of a schedule, played through with the stages of many cuts at once.

The times are those of ``pipeline.simulate`` and the bytes those of ``pipeline.peak_memory``: the
order alone decides who waits for whom, so one pass over the actions serves any number of cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.dependency import needs_of, result_of
from autosplit.pipeline.schedule.routes import boundary_of, target_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.replay import replay
from autosplit.pipeline.simulation.transfer import Transfer

from .stage_costs import StageCosts

_CHANGES = {
    ActionKind.FORWARD: (1, 0),
    ActionKind.BACKWARD_INPUT: (-1, 1),
    ActionKind.BACKWARD_WEIGHT: (0, -1),
    ActionKind.BACKWARD: (-1, 0),
}
_PLACES = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 2,
    ActionKind.BACKWARD: 3,
}


@dataclass(frozen=True)
class _Play:
    """One action: what it needs from another stage, and the rank that gets its result."""

    action: Action
    rank: int
    need: Action | None
    result: Action
    target: int | None


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
        self._plays = list(_plays(schedule))
        held = [torch.tensor(sorted(_states(schedule, rank))) for rank in range(self.ranks)]
        self._states = [each.to(torch.float64) for each in held]
        self._homes = torch.tensor(schedule.placement)

    @property
    def ranks(self) -> int:
        return len(self.schedule.ranks)

    @property
    def actions(self) -> int:
        """How many actions one pass goes over."""
        return len(self._plays)

    def steps(self, stages: StageCosts) -> Tensor:
        """Seconds of a step, ranks waiting for each other at its end; shape [K]."""
        times = torch.cat([stages.times, stages.times[1:2] + stages.times[2:3]])
        zero = torch.zeros(stages.times.shape[2], dtype=torch.float64)
        clocks = [zero] * self.ranks
        links: dict[tuple[int, int], Tensor] = {}
        arrived: dict[Action, Tensor] = {}
        for play in self._plays:
            start = clocks[play.rank]
            if play.need is not None:
                start = torch.maximum(start, arrived.pop(play.need))
            end = start + times[_PLACES[play.action.kind], play.action.stage]
            clocks[play.rank] = end
            if play.target is None:
                continue
            if play.target != play.rank:
                end = self._sent(play, play.target, end, links, stages)
            arrived[play.result] = end
        return torch.stack(clocks).amax(0)

    def _sent(
        self,
        play: _Play,
        target: int,
        end: Tensor,
        links: dict[tuple[int, int], Tensor],
        stages: StageCosts,
    ) -> Tensor:
        """When the result is on the other rank; a link carries one message after the other."""
        link = play.rank, target
        latency, bandwidth = self._links.link(*link)
        if bandwidth != torch.inf:
            end = torch.maximum(end, links[link]) if link in links else end
            forward = play.action.kind is ActionKind.FORWARD
            sizes = stages.crossing if forward else stages.returning
            end = end + sizes[boundary_of(play.result)] / bandwidth
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


def _plays(schedule: Schedule) -> Iterator[_Play]:
    """The actions in an order in which each comes behind all that it needs."""
    run = replay(schedule, lambda action: 1.0)
    timed = [
        (start, rank, action)
        for rank, row in enumerate(schedule.ranks)
        for action, (start, _) in zip(row, run.times[rank], strict=True)
    ]
    for _, rank, action in sorted(timed, key=lambda each: each[:2]):
        others = [n for n in needs_of(action, schedule.stages) if n.stage != action.stage]
        result = result_of(action)
        stage = target_of(result, schedule.stages)
        target = None if stage is None else schedule.placement[stage]
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            target = None
        yield _Play(action, rank, others[0] if others else None, result, target)


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
