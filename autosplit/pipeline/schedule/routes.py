"""Point-to-point traffic between ranks, in order: a pure function of a schedule.

A result is named by the action that makes it (see ``result_of``): ``0F1`` stands for the
outputs of stage 0 for microbatch 1, ``1I1`` for the gradients of stage 1's inputs. Schedules order
stages as a chain. Tensors may go past the next stage (see ``wiring``), but never against that
order, so a schedule that is legal for a chain is so for every wiring: what skips a stage arrives
early and waits.

What an action needs before it can start, and what it makes, is the dependency model. Both are
named by actions. A full backward B makes the same gradient for the previous stage as I does, so its
result goes by the name of I. Which stages feed which is for ``Feeds`` to say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .schedule import Action, ActionKind, Schedule
from .wiring import Feeds


def result_of(action: Action) -> Action:
    """The name of what ``action`` makes: the action itself, or I for a B."""
    if action.kind is ActionKind.BACKWARD:
        return Action(action.stage, ActionKind.BACKWARD_INPUT, action.microbatch)
    return action


def needs_of(action: Action, feeds: Feeds) -> tuple[Action, ...]:
    """The results that must exist before ``action`` starts: its own stage's first.

    F needs the outputs of the stages before it, I and B need their own F and the input gradients
    of the stages behind it, W needs its own I, RECOMPUTE its own F. What
    moves need of each other is in ``moves``.
    """
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is ActionKind.FORWARD:
        return tuple([Action(source, kind, microbatch) for source in feeds.sources(stage)])
    if kind is ActionKind.BACKWARD_WEIGHT:
        return (Action(stage, ActionKind.BACKWARD_INPUT, microbatch),)
    if kind is ActionKind.BACKWARD_INPUT or kind is ActionKind.BACKWARD:
        inputs = ActionKind.BACKWARD_INPUT
        behind = [Action(target, inputs, microbatch) for target in feeds.targets(stage)]
        return (Action(stage, ActionKind.FORWARD, microbatch), *behind)
    if kind.is_compute:  # the forward once more
        return (Action(stage, ActionKind.FORWARD, microbatch),)
    return ()


class Parcel(NamedTuple):
    """The tensors that one stage sends another for one microbatch: outputs, or gradients of such.

    ``result`` names it, ``stage`` is where it goes.
    """

    result: Action
    stage: int

    def __str__(self) -> str:
        return str(self.result)

    @property
    def forward(self) -> bool:
        """Whether these are outputs, rather than gradients."""
        return self.result.kind is ActionKind.FORWARD

    @property
    def boundary(self) -> int:
        """The stage whose outputs these are, or the gradients of whose outputs."""
        return self.result.stage if self.forward else self.stage

    @property
    def taker(self) -> int:
        """The stage at the other end of that boundary."""
        return self.stage if self.forward else self.result.stage

    @property
    def send(self) -> Action:
        """What its sender does, as torch lists it."""
        kind = ActionKind.SEND_F if self.forward else ActionKind.SEND_B
        return Action(self.result.stage, kind, self.result.microbatch)

    @property
    def receive(self) -> Action:
        """What its receiver does."""
        kind = ActionKind.RECV_F if self.forward else ActionKind.RECV_B
        return Action(self.stage, kind, self.result.microbatch)


@dataclass(frozen=True)
class Routes:
    """The sends and receives of one rank in one step.

    Attributes:
        feeds: who feeds whom.
        sends: per peer, what goes to it, in the order in which it is made; what one action makes
            for several stages goes in their order.
        receives: per peer, what comes from it, in the order in which it sends.
        proven: for what comes, how many of the parcels sent to its maker (the first k of
            ``sends``) that rank must have taken before it could make this one. Once it is here,
            waiting for those sends to complete costs nothing.
    """

    feeds: Feeds
    sends: dict[int, tuple[Parcel, ...]]
    receives: dict[int, tuple[Parcel, ...]]
    proven: dict[Parcel, int]


def ends_of(parcel: Parcel, schedule: Schedule) -> tuple[int, int]:
    """The rank that makes a parcel, and the one that it goes to."""
    made = parcel.result
    return (
        schedule.placement[made.stage],
        schedule.placement[parcel.stage],
    )


def routes_of(schedule: Schedule, feeds: Feeds | None = None) -> list[Routes]:
    """The traffic of every rank under a legal ``schedule``; without ``feeds``, that of a chain."""
    feeds = feeds or Feeds(schedule.stages)
    routes = [Routes(feeds, {}, {}, {}) for _ in schedule.ranks]
    made: dict[tuple[int, int], dict[Parcel, int]] = defaultdict(dict)
    for rank, row in enumerate(schedule.ranks):
        for place, action in enumerate(row):
            for parcel in parcels_of(result_of(action), feeds):
                target = schedule.placement[parcel.stage]
                if target != rank:
                    made[rank, target][parcel] = place
    taken = [_first_uses(row, feeds) for row in schedule.ranks]
    for source, target in sorted(made):
        sent, back = made[source, target], tuple(made.get((target, source), ()))
        routes[source].sends[target] = routes[target].receives[source] = tuple(sent)
        count = 0
        for parcel, made_at in sent.items():
            while count < len(back) and taken[source][back[count]] <= made_at:
                count += 1
            routes[target].proven[parcel] = count
    return routes


def pairs_of(schedule: Schedule, feeds: Feeds) -> set[tuple[int, int]]:
    """The pairs of ranks, the lower one first, between which something travels."""
    found = set()
    for stage in range(schedule.stages):
        for taker in feeds.targets(stage):
            ends = schedule.placement[stage], schedule.placement[taker]
            found.add((min(ends), max(ends)))
    return {(low, high) for low, high in found if low != high}


def parcels_of(result: Action, feeds: Feeds) -> tuple[Parcel, ...]:
    """What becomes of a result: one parcel for each stage that it goes to."""
    if result.kind is ActionKind.FORWARD:
        return tuple(Parcel(result, stage) for stage in feeds.targets(result.stage))
    if result.kind is ActionKind.BACKWARD_INPUT:
        return tuple(Parcel(result, stage) for stage in feeds.sources(result.stage))
    return ()


def parcels_for(action: Action, feeds: Feeds) -> tuple[Parcel, ...]:
    """What ``action`` needs of other stages: one parcel of each, in the order of the stages."""
    stage = action.stage
    return tuple(Parcel(need, stage) for need in needs_of(action, feeds) if need.stage != stage)


def _first_uses(row: Sequence[Action], feeds: Feeds) -> dict[Parcel, int]:
    """For what a rank needs, the place of the first action that needs it."""
    uses: dict[Parcel, int] = {}
    for place, action in enumerate(row):
        for parcel in parcels_for(action, feeds):
            uses.setdefault(parcel, place)
    return uses
