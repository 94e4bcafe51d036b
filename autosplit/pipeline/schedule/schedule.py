"""A pipeline schedule as data: what each rank computes, in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from autosplit.errors import ScheduleError

from .action import Action

LARGEST = 1_000_000
"""Actions of a step: beyond, a schedule takes minutes and gigabytes to make and to check."""


def check_size(stages: int, microbatches: int, most: int = LARGEST) -> None:
    """Refuse a step that is too large to be worked on, before anything is made of it.

    Args:
        stages: N.
        microbatches: M.
        most: how many actions there may be.

    Raises:
        ScheduleError: N x M times F, I and W are more.
    """
    actions = 3 * stages * microbatches
    if actions > most:
        raise ScheduleError(
            f"{stages:,} stages and {microbatches:,} microbatches make a step of {actions:,} "
            f"actions, more than the {most:,} that are taken: use fewer stages, or fewer and "
            "larger microbatches"
        )


def check_counts(**counts: int) -> None:
    """Refuse anything but integers from 1 on.

    Raises:
        ScheduleError: names the argument and what came.
    """
    for what, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ScheduleError(f"{what} must be an integer >= 1, got {value!r}")


@dataclass(frozen=True)
class Schedule:
    """The actions of one training step: what each rank computes, and what it moves elsewhere.

    Attributes:
        name: the schedule's name, for messages and tables.
        stages: number of stages N.
        microbatches: number of microbatches M.
        ranks: per rank, its actions in the order in which it runs them: F, I, W and B, and those
            of memory where it starts them (see ``moves``). Sends and receives follow from these
            and from ``placement``.
        placement: ``placement[stage]`` is the rank that holds the stage.
        split_backward: False when every backward is a full one (B).
        crosses_step: True when ranks do not wait for each other between steps, so that a rank
            that is done starts the next step while others still work on this one.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...] = field(repr=False)
    placement: tuple[int, ...]
    split_backward: bool
    crosses_step: bool = False

    def partner(self, rank: int) -> int:
        """The rank that takes in what a rank evicts, in BPipe the one at the other end."""
        return len(self.ranks) - 1 - rank

    def held(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)
