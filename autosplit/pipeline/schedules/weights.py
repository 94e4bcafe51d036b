"""Where the backward weights go: shared by every schedule that can split its backward.

A schedule says in which order each stage runs F and B. This file turns the Bs into Is and places
the Ws, always oldest microbatch first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from autosplit.errors import ScheduleError
from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.schedule import Schedule
from autosplit.pipeline.schedules.fill import StageTimes, fill
from autosplit.pipeline.simulate import simulate

WEIGHTS = ("2bp", "fill")
"""Known placements of W."""

Times = StageTimes | Sequence[StageTimes]
"""Assumed durations of F, I and W: one triple for every stage, or one triple per stage."""

_SPLIT_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_PATIENCE = (0.5, 0.25, 0.0, 1.0)


def place_weights(
    name: str,
    orders: Sequence[Sequence[Action]],
    *,
    paced: Sequence[int],
    limit: int,
    split_backward: bool,
    weights: str | None,
    times: Times | None,
) -> Schedule:
    """The schedule, one stage a rank, that runs each stage's F and B in the given order.

    Args:
        name: the schedule's name.
        orders: per stage, its F and B.
        paced: for ``weights="2bp"``, per stage, how many of the last Is are each followed by one
            W; the other Ws run at the end.
        limit: for ``weights="fill"``, at most so many microbatches per stage whose F has run and
            whose W has not.
        split_backward: False keeps the Bs; then ``weights`` and ``times`` must be None.
        weights: ``"2bp"`` or ``"fill"``; None means ``"fill"``.
        times: durations that ``"fill"`` is to suit; None means F = I = W.

    Raises:
        ScheduleError: an unknown placement, or an option that would have no effect.
    """
    weights = _check_weights(split_backward, weights, times)
    if weights is None:
        ranks = tuple(tuple(order) for order in orders)
    elif weights == "2bp":
        ranks = tuple(
            _paper(_inputs_only(order), count) for order, count in zip(orders, paced, strict=True)
        )
    else:
        ranks = _fill_best([_inputs_only(order) for order in orders], limit, times)
    return _schedule(name, ranks, split_backward)


def check_counts(**counts: int) -> None:
    """Refuse anything but integers from 1 on.

    Raises:
        ScheduleError: names the argument and what came.
    """
    for what, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ScheduleError(f"{what} must be an integer >= 1, got {value!r}")


def _check_weights(split_backward: bool, weights: str | None, times: Times | None) -> str | None:
    """The placement to use, or None for full backwards."""
    if weights is not None and weights not in WEIGHTS:
        raise ScheduleError(f"unknown weights {weights!r}; known: {', '.join(WEIGHTS)}")
    if not split_backward:
        for option, value in (("weights", weights), ("times", times)):
            if value is not None:
                raise ScheduleError(
                    f"{option}={value!r} has no meaning with split_backward=False, where no W "
                    f"exists: leave {option} out or split the backward"
                )
        return None
    if weights == "2bp" and times is not None:
        raise ScheduleError(
            "times has no meaning with weights='2bp', a fixed placement: leave times out or use "
            "weights='fill'"
        )
    return weights or "fill"


def _inputs_only(order: Sequence[Action]) -> list[Action]:
    """The order with each B replaced by its I."""
    return [
        Action(action.stage, ActionKind.BACKWARD_INPUT, action.microbatch)
        if action.kind is ActionKind.BACKWARD
        else action
        for action in order
    ]


def _paper(order: Sequence[Action], count: int) -> tuple[Action, ...]:
    """One W after each of the last ``count`` Is, and the rest at the end."""
    inputs = [action for action in order if action.kind is ActionKind.BACKWARD_INPUT]
    followed = set(inputs[max(len(inputs) - count, 0) :])
    pending = [Action(a.stage, ActionKind.BACKWARD_WEIGHT, a.microbatch) for a in inputs]
    pending.reverse()
    result = []
    for action in order:
        result.append(action)
        if action in followed:
            result.append(pending.pop())
    return (*result, *reversed(pending))


def _fill_best(
    orders: Sequence[Sequence[Action]], limit: int, times: Times | None
) -> tuple[tuple[Action, ...], ...]:
    """Fill under F = I = W and, given times, under those too; keep what they make shortest.

    The order for F = I = W is the first candidate because it is hard to beat: a greedy choice
    under true times may start a W that no longer fits and pass the delay on to every stage.
    """
    stages = len(orders)
    best = fill(orders, limit, [(1.0, 1.0, 1.0)] * stages)
    if times is None:
        return best
    triples = per_stage(times, stages)
    duration = {
        (stage, kind): seconds
        for stage, triple in enumerate(triples)
        for kind, seconds in zip(_SPLIT_KINDS, triple, strict=True)
    }
    candidates = [best, *(fill(orders, limit, triples, patience=each) for each in _PATIENCE)]
    return min(
        candidates, key=lambda ranks: simulate(_schedule("fill", ranks, True), duration).makespan
    )


def _schedule(name: str, ranks: tuple[tuple[Action, ...], ...], split_backward: bool) -> Schedule:
    """One stage a rank."""
    stages = len(ranks)
    microbatches = sum(action.kind is ActionKind.FORWARD for action in ranks[0])
    return Schedule(name, stages, microbatches, ranks, tuple(range(stages)), split_backward)


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
