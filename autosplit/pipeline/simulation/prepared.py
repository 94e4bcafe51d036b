"""A schedule with what its ranks need to run it: messages, the order of receives, and moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autosplit.pipeline.schedule.moves import ActivationMove, find_moves
from autosplit.pipeline.schedule.routes import Routes, StageDataflow, pairs_of, routes_of
from autosplit.pipeline.schedule.schedule import Action, Schedule
from autosplit.pipeline.simulation.playing import recv_posting_order


@dataclass(frozen=True)
class PreparedSchedule:
    """A schedule, and all that follows from it for the ranks that run it.

    Each part is computed when it is first used: a simulation needs none of them.

    Attributes:
        schedule: a legal schedule.
        dataflow: the dataflow between its stages.
    """

    schedule: Schedule
    dataflow: StageDataflow

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The pairs of ranks that exchange messages, the lower one first."""
        return pairs_of(self.schedule, self.dataflow)

    @cached_property
    def moves(self) -> Sequence[ActivationMove]:
        """The moves of activations to the host or to a partner rank, of all ranks."""
        return find_moves(self.schedule)

    @cached_property
    def routes(self) -> Sequence[Routes]:
        """The messages that each rank sends and receives, in order."""
        return routes_of(self.schedule, self.dataflow)

    @cached_property
    def recv_posts(self) -> Sequence[Mapping[Action, Sequence[int]]]:
        """The peers from which each rank posts receives, by the action that follows."""
        return recv_posting_order(self.schedule, self.dataflow)
