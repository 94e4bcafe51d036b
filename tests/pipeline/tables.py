"""Schedules as text, for the tests of schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import reject

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.routes import Source, Wiring
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule


def rows_of(schedule: Schedule) -> list[str]:
    """One line of actions per rank."""
    return [" ".join(map(str, row)) for row in schedule.ranks]


def schedule_of(
    *rows: str,
    stages: int = 2,
    microbatches: int = 2,
    placement: tuple[int, ...] | None = None,
    split_backward: bool = True,
) -> Schedule:
    """A schedule from one line of actions per rank."""
    ranks = tuple(tuple(Action.parse(text) for text in row.split()) for row in rows)
    places = tuple(range(stages)) if placement is None else placement
    return Schedule("table", stages, microbatches, ranks, places, split_backward)


def chain_of(outputs: Sequence[int], batch: int = 1) -> Wiring:
    """Every stage takes all that the one before gives, the first the ``batch`` inputs."""
    first = tuple(Source(None, position) for position in range(batch))
    later = (
        tuple(Source(stage, position) for position in range(count))
        for stage, count in enumerate(outputs)
    )
    return Wiring((first, *later), tuple(outputs))


def small(name: str, ranks: int, microbatches: int) -> Schedule:
    """A schedule by name with two stages a rank where it leaves that open.

    Counts that it does not admit are no example for hypothesis.
    """
    try:
        return build(name, ranks * (SCHEDULES[name].chunks or 2), microbatches, ranks=ranks)
    except ScheduleError:
        reject()


def seconds(forward: float, inputs: float, weights: float) -> Callable[[Action], float]:
    """Durations alike on all stages; a B takes I + W."""
    table = {
        ActionKind.FORWARD: forward,
        ActionKind.BACKWARD_INPUT: inputs,
        ActionKind.BACKWARD_WEIGHT: weights,
        ActionKind.BACKWARD: inputs + weights,
    }
    return lambda action: table[action.kind]


def most_alive(schedule: Schedule) -> list[int]:
    """Per rank, the most pairs of a stage and a microbatch between F and W (or B)."""
    highest = []
    for row in schedule.ranks:
        alive = most = 0
        for action in row:
            alive += {"F": 1, "I": 0, "W": -1, "B": -1}[action.kind.value]
            most = max(most, alive)
        highest.append(most)
    return highest
