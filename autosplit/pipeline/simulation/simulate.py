"""Schedule and durations in, timeline out: what a step would take without running it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import journeys_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds, Wiring

from .activation_memory import StageMemory
from .early_weights import EarlyWeights, Slices, cutter
from .event_loop import play
from .lanes import Lanes, add_lanes, ways
from .reductions import Reductions
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
    memory: Sequence[StageMemory] | None = None,
    reductions: Reductions | None = None,
    gathers: Sequence[float] | None = None,
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
            slice, which replace the duration of its W. A W of what is away between I and W stays
            where the schedule has it.
        memory: per stage, what it keeps of a microbatch, of which moves between ranks or to the
            host take as much; needed where their links have a bandwidth.
        reductions: what replicas of the pipeline reduce; None: there is one pipeline.
        gathers: per stage, seconds of its UNSHARD, in which its rank does nothing else; None: it
            takes no time. A RESHARD takes none.

    Returns:
        The timeline, from time 0, spans sorted by start, then rank. The span of a move is the time
        of its transfer, on the rank that the move is of.

    Raises:
        ScheduleError: the lists deadlock, a duration or the bytes of a message are missing, a time
            is negative or not finite, the wiring is of another number of stages, there are
            slices without ``early_weights``, or the bytes of a move are not known.
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
    graph, rows = StepGraph(schedule, feeds=feeds, transfer=transfer), rows_of(schedule)
    way = ways(schedule, transfer, memory)
    lanes = add_lanes(graph, schedule, rows, way, costs=transfer.moves)
    seconds = _Seconds(graph, duration, lanes, gathers)
    return run_step(
        schedule,
        graph,
        rows,
        lanes,
        seconds,
        early_weights=early_weights,
        slices=slices,
        reductions=reductions,
    )


def run_step(
    schedule: Schedule,
    graph: StepGraph,
    rows: Sequence[Sequence[int]],
    lanes: Lanes,
    seconds: dict[int, float] | list[float],
    *,
    early_weights: bool,
    slices: Slices,
    reductions: Reductions | None = None,
) -> Timeline:
    """The timeline of a step whose graph is made; changes ``seconds``.

    Raises:
        ScheduleError: it deadlocks.
    """
    played = [*rows, *lanes.rows]
    run = play(graph, played, seconds)
    waits = waits_of(graph, played, run, len(rows))
    if waits:
        text = "".join(f"\n  {wait}" for wait in waits.values())
        raise ScheduleError(f"schedule {schedule.name!r} cannot run to its end:{text}")
    ran = [[(n, run.starts[n], run.starts[n] + seconds[n]) for n in row] for row in rows]
    if early_weights:
        early = _early(graph, schedule, played, seconds, slices)
        run = play(graph, played, seconds, early)
        ran = [each.spans for each in early[: len(rows)]]
    spans = [
        Span(rank, graph.actions[number], start, end)
        for rank, each in enumerate(ran)
        for number, start, end in each
        if graph.actions[number].kind.is_compute or graph.actions[number].kind is ActionKind.UNSHARD
    ]
    spans += [Span(*each) for each in lanes.spans(run.starts)]
    if reductions is not None:
        spans += reductions.spans(spans)
    spans.sort(key=lambda span: (span.start, span.rank))
    return Timeline(len(schedule.ranks), tuple(spans), schedule.crosses_step)


def _early(
    graph: StepGraph,
    schedule: Schedule,
    rows: Sequence[Sequence[int]],
    seconds: dict[int, float] | list[float],
    slices: Slices,
) -> list[EarlyWeights]:
    """The Ws of every rank in slices; in their places they take no ``seconds`` any more."""
    away = {(each.stage, each.microbatch) for each in journeys_of(schedule) if each.deferred}
    weights = [
        number
        for number, each in enumerate(graph.actions)
        if each.kind is ActionKind.BACKWARD_WEIGHT and (each.stage, each.microbatch) not in away
    ]
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

    def __init__(
        self,
        graph: StepGraph,
        duration: Durations,
        lanes: Lanes,
        gathers: Sequence[float] | None,
    ) -> None:
        super().__init__(lanes.took)
        self._spent = lanes.spent
        self._gathers = gathers
        self._actions = graph.actions
        self._duration = duration

    def __missing__(self, number: int) -> float:
        action, duration = self._actions[number], self._duration
        gathers = self._gathers if action.kind is ActionKind.UNSHARD else None
        spent = self._spent.get(number, 0.0)
        if not action.kind.is_compute and gathers is None:
            return spent
        if gathers is not None:
            value = gathers[action.stage]
        elif isinstance(duration, Mapping):
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
        self[number] = value + spent
        return self[number]
