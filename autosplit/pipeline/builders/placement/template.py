"""A schedule before its backward is split: in which order each rank runs F and B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.pipeline.schedule.action import Action, ActionKind

Row = tuple[Action, ...]
"""What one rank runs, in order."""


@dataclass(frozen=True)
class ScheduleTemplate:
    """The order of F and B that a builder gives; how the backward is split comes later.

    Attributes:
        rows: per rank, its F and B; a schedule that places its own Ws lists I and W as well.
        placement: ``placement[stage]`` is the rank that holds the stage.
        budgets: per rank, how many pairs of a stage and a microbatch may be between F and W at
            once when ``weights="fill"`` places the Ws.
        paced: for ``weights="2bp"``, per rank, how many of the last Is are each followed by one
            W; the other Ws run at the end. None where 2BP describes no such schedule.
        mirror: see ``Schedule``.
        crosses_step: see ``Schedule``.
    """

    rows: tuple[Row, ...]
    placement: tuple[int, ...]
    budgets: tuple[int, ...] = ()
    paced: tuple[int, ...] | None = None
    mirror: tuple[int, ...] | None = None
    crosses_step: bool = False


def forward(stage: int, microbatch: int) -> Action:
    """F."""
    return Action(stage, ActionKind.FORWARD, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """B."""
    return Action(stage, ActionKind.BACKWARD, microbatch)


def most_in_flight(row: Sequence[Action]) -> int:
    """The most pairs of a stage and a microbatch whose F has run and whose B (or W) has not."""
    most = flying = 0
    for action in row:
        if action.kind is ActionKind.FORWARD:
            flying += 1
            most = max(most, flying)
        elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            flying -= 1
    return most
