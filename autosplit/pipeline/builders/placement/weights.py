"""Where the backward weights go: shared by every schedule that can split its backward.

A schedule says in which order each rank runs F and B. This file turns the Bs into Is and places
the Ws, always oldest microbatch first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule

from .fill import Filled, Filler, StageTimes
from .template import Row, ScheduleTemplate

WEIGHTS = ("2bp", "fill")
"""Known placements of W."""

Times = StageTimes | Sequence[StageTimes]
"""Assumed durations of F, I and W: one triple for every stage, or one triple per stage."""

_PATIENCE = (0.5, 0.25, 0.0, 1.0)


class WeightPlacement:
    """The schedules of a template, for any times of its stages.

    Args:
        name: the schedule's name.
        template: the order of F and B.
        weights: ``"2bp"``, ``"fill"``, or None to run the rows as they are.
    """

    def __init__(self, name: str, template: ScheduleTemplate, weights: str | None) -> None:
        self._name = name
        self._template = template
        self._weights = weights

    def schedule(self, times: Times | None) -> Schedule:
        """The schedule for these times, which ``"fill"`` is to suit; None means F = I = W.

        Raises:
            ScheduleError: times that are none.
        """
        template = self._template
        if self._weights == "2bp" and template.paced is not None:
            rows = zip(template.rows, template.paced, strict=True)
            ranks = tuple(_paper(_inputs_only(row), count) for row, count in rows)
        elif self._weights == "fill":
            ranks = self._filled(times)
        else:
            ranks = template.rows
        return with_rows(self._name, template, ranks)

    def _filled(self, times: Times | None) -> tuple[Row, ...]:
        """Fill under F = I = W and, given times, under those too; keep what they make shortest.

        The order for F = I = W is the first candidate because it is hard to beat: a greedy choice
        under true times may start a W that no longer fits and pass the delay on to every stage.
        """
        filler, even = self._even
        if times is None:
            return even.rows
        triples = per_stage(times, len(self._template.placement))
        step = filler.step(even.numbers, triples)
        greedy = min(
            (filler.fill(triples, patience=each) for each in _PATIENCE), key=lambda each: each.step
        )
        return even.rows if step <= greedy.step else greedy.rows

    @cached_property
    def _even(self) -> tuple[Filler, Filled]:
        """What fills, and how it does under F = I = W."""
        template = self._template
        unfilled = with_rows(self._name, template, tuple(map(_inputs_only, template.rows)))
        filler = Filler(unfilled, template.budgets)
        return filler, filler.fill([(1.0, 1.0, 1.0)] * unfilled.stages)


def _inputs_only(row: Sequence[Action]) -> Row:
    """The row with each B replaced by its I."""
    return tuple(
        replace(action, kind=ActionKind.BACKWARD_INPUT)
        if action.kind is ActionKind.BACKWARD
        else action
        for action in row
    )


def _paper(row: Row, count: int) -> Row:
    """One W after each of the last ``count`` Is, and the rest at the end."""
    inputs = [action for action in row if action.kind is ActionKind.BACKWARD_INPUT]
    followed = set(inputs[max(len(inputs) - count, 0) :])
    pending = [replace(action, kind=ActionKind.BACKWARD_WEIGHT) for action in inputs]
    pending.reverse()
    result = []
    for action in row:
        result.append(action)
        if action in followed:
            result.append(pending.pop())
    return (*result, *reversed(pending))


def with_rows(name: str, template: ScheduleTemplate, ranks: tuple[Row, ...]) -> Schedule:
    """The schedule that runs ``ranks`` where ``template`` places its stages."""
    actions = [action for row in ranks for action in row]
    return Schedule(
        name,
        len(template.placement),
        1 + max(action.microbatch for action in actions),
        ranks,
        template.placement,
        any(action.kind is ActionKind.BACKWARD_INPUT for action in actions),
        template.mirror,
        template.crosses_step,
    )


def per_stage(times: Times, stages: int) -> list[StageTimes]:
    """``times`` as one triple per stage.

    Raises:
        ScheduleError: not triples of finite numbers >= 0, or not one for each stage.
    """
    rows: list[object] = list(times) if isinstance(times, Sequence) else []
    triples = rows if all(isinstance(row, Sequence) for row in rows) else [times] * stages
    if len(triples) != stages or not all(_is_triple(row) for row in triples):
        raise ScheduleError(
            "times must be (F, I, W), or one such triple for each of the "
            f"{stages} stages, all finite and >= 0; got {times!r}"
        )
    return cast("list[StageTimes]", triples)


def _is_triple(row: object) -> bool:
    return (
        isinstance(row, Sequence)
        and len(row) == 3
        and all(
            isinstance(each, (int, float)) and math.isfinite(each) and each >= 0 for each in row
        )
    )
