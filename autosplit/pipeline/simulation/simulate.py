"""Schedule and durations in, timeline out: what a step would take without running it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds, Wiring

from .arrivals import Arrivals
from .early_weights import Slices, fill_waits
from .replay import replay
from .timeline import Span, Timeline
from .transfer import Transfer

Durations = Callable[[Action], float] | Mapping[tuple[int, ActionKind], float]


def simulate(
    schedule: Schedule,
    duration: Durations,
    *,
    transfer: Transfer | float = 0.0,
    wiring: Wiring | None = None,
    early_weights: bool = False,
    slices: Slices = 1,
) -> Timeline:
    """Discrete-event simulation of one step.

    Every rank runs its list in order and starts an action as soon as it is free and the results
    the action needs have arrived. Sends cost the sender nothing. The time is linear in the number
    of actions (plus one sort).

    Args:
        schedule: the rank lists.
        duration: seconds of an action: a function of the action, or a mapping from
            ``(stage, kind)``.
        transfer: the links between ranks, or the seconds from the end of an action to the arrival
            of its result on another rank.
        wiring: who feeds whom, skip connections with it; None: each stage the next. Messages are
            those of the engine: one for each stage that takes of a result, with the tensors that
            no earlier stage of the same rank was sent.
        early_weights: run the next weight gradients in every wait, as a trainer does that is given
            ``early_weights=True``, rather than where the schedule has them.
        slices: into how many equal parts each W is cut for that; or by stage the seconds of each
            slice, which replace the duration of its W.

    Returns:
        The timeline, from time 0, spans sorted by start, then rank.

    Raises:
        ScheduleError: the lists deadlock, a duration or the bytes of a message are missing, a time
            is negative or not finite, the wiring is of another number of stages, or there are
            slices without ``early_weights``.
    """
    if not isinstance(transfer, Transfer):
        transfer = Transfer(latency=transfer)
    if slices != 1 and not early_weights:
        raise ScheduleError(f"slices={slices!r} has no effect without early_weights=True")
    if wiring is not None and wiring.stages != schedule.stages:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.stages} stages, but the wiring that of "
            f"{wiring.stages}"
        )
    feeds = None if wiring is None else Feeds(schedule.stages, wiring)
    seconds = _lookup(duration)
    run = replay(schedule, seconds, transfer=transfer, feeds=feeds)
    if run.waits:
        waits = "".join(f"\n  {run.waits[rank]}" for rank in sorted(run.waits))
        raise ScheduleError(f"schedule {schedule.name!r} cannot run to its end:{waits}")
    if early_weights:
        spans = fill_waits(schedule, seconds, Arrivals(schedule, transfer, feeds), slices)
    else:
        spans = [
            Span(rank, action, start, end)
            for rank, row in enumerate(schedule.ranks)
            for action, (start, end) in zip(row, run.times[rank], strict=True)
        ]
    spans.sort(key=lambda span: (span.start, span.rank))
    return Timeline(len(schedule.ranks), tuple(spans), schedule.crosses_step)


def _lookup(duration: Durations) -> Callable[[Action], float]:
    """``duration`` as a function that refuses missing and impossible times."""

    def seconds(action: Action) -> float:
        if isinstance(duration, Mapping):
            key = (action.stage, action.kind)
            if key not in duration:
                raise ScheduleError(
                    f"no duration for {action}: expected the key "
                    f"({action.stage}, ActionKind.{action.kind.name}) in the mapping"
                )
            value = duration[key]
        else:
            value = duration(action)
        if not (math.isfinite(value) and value >= 0.0):
            raise ScheduleError(
                f"the duration of {action} must be finite seconds >= 0, got {value!r}"
            )
        return value

    return seconds
