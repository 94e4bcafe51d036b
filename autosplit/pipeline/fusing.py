"""Run an I and the W right behind it as one B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.dependency import needs_of
from autosplit.pipeline.schedule import Schedule
from autosplit.pipeline.simulate import Durations, simulate
from autosplit.pipeline.transfer import Transfer


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
        duration: seconds of an action. Given, only those pairs become a B whose gradient nobody
            waits for before W ends, so that no other rank starts anything later; None fuses all.
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
    """Is whose gradient another rank would still wait for while their W runs."""
    spans = {span.action: span for span in simulate(schedule, duration, transfer=transfer).spans}
    urgent = set()
    for consumer, span in spans.items():
        for need in needs_of(consumer, schedule.stages):
            weight = spans.get(replace(need, kind=ActionKind.BACKWARD_WEIGHT))
            maker = spans.get(need)
            if maker is None or weight is None or maker.rank == span.rank:
                continue
            travel = transfer.latency if isinstance(transfer, Transfer) else transfer
            if isinstance(transfer, Transfer):
                travel += transfer.occupies(need)
            if span.start < weight.end + travel:
                urgent.add(need)
    return frozenset(urgent)
