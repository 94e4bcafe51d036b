"""Which results travel between which ranks, in which order: a pure function of a schedule.

A result is named by the action that makes it (see ``dependency``): ``0F1`` is what stage 0 put
out for microbatch 1, ``1I1`` the gradient of stage 1's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autosplit.errors import ScheduleError
from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.dependency import needs_of, result_of
from autosplit.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Routes:
    """One rank's traffic in one step.

    Attributes:
        sends: per peer, the results that go to it, in the order in which they are made.
        receives: per peer, the results that come from it, in the order in which it makes them.
        proven: per received result, how many of the results sent to its maker (the first k of
            ``sends``) that rank must have taken before it could make this one. Once it is here,
            waiting for those sends to complete costs nothing.
    """

    sends: Mapping[int, tuple[Action, ...]]
    receives: Mapping[int, tuple[Action, ...]]
    proven: Mapping[Action, int]


@dataclass(frozen=True, order=True)
class Channel:
    """The way of results of one kind from one stage to its neighbour; first in, first out.

    Activations go from stage s to s + 1, gradients from s + 1 to s, so the two stages name the
    kind as well.
    """

    source_stage: int
    target_stage: int
    source_rank: int
    target_rank: int

    @property
    def local(self) -> bool:
        """Whether it stays on one rank, so that nothing is sent."""
        return self.source_rank == self.target_rank


def channel_of(result: Action, schedule: Schedule) -> Channel:
    """The channel of a result that another stage needs.

    Raises:
        ScheduleError: no other stage needs it.
    """
    target = target_of(result, schedule.stages)
    if target is None:
        raise ScheduleError(f"no stage needs the result of {result} from another")
    return Channel(
        result.stage,
        target,
        schedule.home(result.stage, result.microbatch),
        schedule.home(target, result.microbatch),
    )


def target_of(result: Action, stages: int) -> int | None:
    """The stage that needs ``result``, or None when no other stage does."""
    if result.kind is ActionKind.FORWARD:
        return result.stage + 1 if result.stage + 1 < stages else None
    if result.kind is ActionKind.BACKWARD_INPUT:
        return result.stage - 1 if result.stage > 0 else None
    return None


def boundary_of(result: Action) -> int:
    """The boundary that ``result`` crosses: boundary s lies between stages s and s + 1."""
    return result.stage if result.kind is ActionKind.FORWARD else result.stage - 1


def routes_of(schedule: Schedule, rank: int) -> Routes:
    """The traffic of ``rank`` under a legal ``schedule``."""
    peers = [peer for peer in range(len(schedule.ranks)) if peer != rank]
    sends = {peer: tuple(_sent(schedule, rank, peer)) for peer in peers}
    receives = {peer: tuple(_sent(schedule, peer, rank)) for peer in peers}
    proven: dict[Action, int] = {}
    for peer in peers:
        taken = _first_uses(schedule, peer)
        for result, made_at in _sent(schedule, peer, rank).items():
            count = 0
            while count < len(sends[peer]) and taken[sends[peer][count]] <= made_at:
                count += 1
            proven[result] = count
    return Routes(
        sends={peer: results for peer, results in sends.items() if results},
        receives={peer: results for peer, results in receives.items() if results},
        proven=proven,
    )


def _sent(schedule: Schedule, source: int, target: int) -> dict[Action, int]:
    """Results that ``source`` makes for ``target``, in order, with the place of their action."""
    sent = {}
    for position, action in enumerate(schedule.ranks[source]):
        result = result_of(action)
        stage = target_of(result, schedule.stages)
        if stage is not None and schedule.home(stage, result.microbatch) == target:
            sent[result] = position
    return sent


def _first_uses(schedule: Schedule, rank: int) -> dict[Action, int]:
    """Per result that ``rank`` needs, the place of the first action that needs it."""
    uses: dict[Action, int] = {}
    for position, action in enumerate(schedule.ranks[rank]):
        for need in needs_of(action, schedule.stages):
            uses.setdefault(need, position)
    return uses
