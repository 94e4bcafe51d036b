"""Run an I and the W right behind it as one B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.dependency import needs_of
from autosplit.pipeline.schedule import Schedule
from autosplit.pipeline.simulate import Durations, simulate
from autosplit.pipeline.timeline import Span
from autosplit.pipeline.transfer import Transfer

_TOLERANCE = 1e-9  # ends that differ by rounding are equal


def fuse_adjacent(
    schedule: Schedule,
    duration: Durations | None = None,
    *,
    transfer: Transfer | float = 0.0,
) -> Schedule:
    """Replace each I that its own W follows by one B, which costs less than both and keeps nothing.

    A B hands its gradient on only when it is done, later than the I would have.

    Args:
        schedule: a legal one.
        duration: seconds of an action. Given, only those pairs become a B that takes no longer
            than both and whose gradient nobody waits for before it ends, so that no other rank
            starts anything later; None fuses all. In a mapping without a stage's B, it takes as
            long as both.
        transfer: the links between ranks, as for ``simulate``; has no effect without ``duration``.

    Raises:
        ScheduleError: the schedule deadlocks, or a duration is missing.
    """
    urgent = frozenset() if duration is None else _urgent(schedule, duration, transfer)
    return replace(schedule, ranks=tuple(tuple(_fused(row, urgent)) for row in schedule.ranks))


def _fused(row: Sequence[Action], urgent: frozenset[Action]) -> Iterator[Action]:
    skip = False
    for place, action in enumerate(row):
        if skip:
            skip = False
            continue
        weight = replace(action, kind=ActionKind.BACKWARD_WEIGHT)
        if (
            action.kind is ActionKind.BACKWARD_INPUT
            and row[place + 1 : place + 2] == (weight,)
            and action not in urgent
        ):
            skip = True
            yield replace(action, kind=ActionKind.BACKWARD)
        else:
            yield action


def _urgent(
    schedule: Schedule, duration: Durations, transfer: Transfer | float
) -> frozenset[Action]:
    """Is whose gradient another rank would still wait for while a B runs, or whose B is longer."""
    spans = {span.action: span for span in simulate(schedule, duration, transfer=transfer).spans}
    ends: dict[Action, float] = {}
    urgent = set()
    for action, span in spans.items():
        weight = spans.get(replace(action, kind=ActionKind.BACKWARD_WEIGHT))
        if action.kind is ActionKind.BACKWARD_INPUT and weight is not None:
            ends[action] = _end_of_whole(span, weight, duration)
            if ends[action] > weight.end * (1 + _TOLERANCE):
                urgent.add(action)
    for consumer, span in spans.items():
        for need in needs_of(consumer, schedule.stages):
            if need not in ends or spans[need].rank == span.rank:
                continue
            travel = transfer.latency if isinstance(transfer, Transfer) else transfer
            if isinstance(transfer, Transfer):
                travel += transfer.occupies(need)
            if span.start < ends[need] + travel:
                urgent.add(need)
    return frozenset(urgent)


def _end_of_whole(inputs: Span, weights: Span, duration: Durations) -> float:
    """When a B in the place of an I and a W would end."""
    whole = replace(inputs.action, kind=ActionKind.BACKWARD)
    if not isinstance(duration, Mapping):
        return inputs.start + duration(whole)
    seconds = duration.get((whole.stage, whole.kind))
    return weights.end if seconds is None else inputs.start + seconds
