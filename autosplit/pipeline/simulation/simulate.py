"""Schedule and durations in, timeline out: what a step would take without running it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds, Wiring

from .early_weights import EarlyWeights, Slices, cutter
from .event_loop import play
from .replay import rows_of, waits_of
from .step_graph import StepGraph
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
    graph = StepGraph(schedule, feeds=feeds, transfer=transfer)
    rows, seconds = rows_of(schedule), _Seconds(graph, duration)
    run = play(graph, rows, seconds)
    waits = waits_of(graph, rows, run)
    if waits:
        text = "".join(f"\n  {wait}" for wait in waits.values())
        raise ScheduleError(f"schedule {schedule.name!r} cannot run to its end:{text}")
    ran = [[(n, run.starts[n], run.starts[n] + seconds[n]) for n in row] for row in rows]
    if early_weights:
        early = _early(graph, rows, seconds, slices)
        play(graph, rows, seconds, early)
        ran = [each.spans for each in early]
    spans = [
        Span(rank, graph.actions[number], start, end)
        for rank, each in enumerate(ran)
        for number, start, end in each
    ]
    spans.sort(key=lambda span: (span.start, span.rank))
    return Timeline(len(schedule.ranks), tuple(spans), schedule.crosses_step)


def _early(
    graph: StepGraph, rows: Sequence[Sequence[int]], seconds: dict[int, float], slices: Slices
) -> list[EarlyWeights]:
    """The Ws of every rank in slices; in their places they take no ``seconds`` any more."""
    weights = [n for n, each in enumerate(graph.actions) if each.kind is ActionKind.BACKWARD_WEIGHT]
    cut = cutter(slices)
    parts: list[Sequence[float]] = [()] * len(graph.actions)
    for number in weights:
        parts[number] = cut(graph.actions[number].stage, seconds[number])
        seconds[number] = 0.0
    inputs = graph.inputs_of_weights()
    return [EarlyWeights(row, seconds, parts, inputs) for row in rows]


class _Seconds(dict[int, float]):
    """Durations by the number of an action, asked for once each and only when it runs.

    Missing and impossible ones are refused.
    """

    def __init__(self, graph: StepGraph, duration: Durations) -> None:
        super().__init__()
        self._actions = graph.actions
        self._duration = duration

    def __missing__(self, number: int) -> float:
        action, duration = self._actions[number], self._duration
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
        self[number] = value
        return value
