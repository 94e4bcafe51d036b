"""A schedule with the messages, the order of receives and the moves that its ranks need to run
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autosplit.pipeline.schedule.moves import ActivationMove, find_moves
from autosplit.pipeline.schedule.routes import Routes, StageDataflow, routes_of
from autosplit.pipeline.schedule.schedule import Action, Schedule
from autosplit.pipeline.simulation.playing import recv_posting_order


@dataclass(frozen=True)
class PreparedSchedule:
    """A schedule, and the messages, receives and moves that follow from it.

    Messages, receives and moves are computed on first use, because a simulation needs none of them.

    Attributes:
        schedule: a legal schedule.
        dataflow: the dataflow between its stages.
    """

    schedule: Schedule
    dataflow: StageDataflow

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The pairs of ranks that exchange messages, the lower rank first."""
        placement = self.schedule.placement
        pairs = ((placement[source], placement[target]) for source, target in self.dataflow)
        return {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}

    @cached_property
    def moves(self) -> Sequence[ActivationMove]:
        """The moves of activations to the host or to a partner rank, of all ranks."""
        return find_moves(self.schedule)

    @property
    def partner_pairs(self) -> set[tuple[int, int]]:
        """The pairs of ranks between which activations move, the lower rank first."""
        pairs = ((move.rank, move.partner) for move in self.moves if move.partner is not None)
        return {(min(pair), max(pair)) for pair in pairs}

    @cached_property
    def routes(self) -> Sequence[Routes]:
        """The messages that each rank sends and receives, in order."""
        return routes_of(self.schedule, self.dataflow)

    @cached_property
    def recv_posts(self) -> Sequence[Mapping[Action, Sequence[int]]]:
        """For each rank, maps an action to the peers from which receives are posted before it."""
        return recv_posting_order(self.schedule, self.dataflow)
