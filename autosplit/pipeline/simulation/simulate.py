"""Timelines of a step, measured by the executor or simulated, and the costs of stages."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.routes import StageDataflow, Wiring
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule

from .activation_memory import StageMemory
from .collectives import StageCollectives, add_collectives, with_collectives
from .playing import play, rows_of, waits_of
from .step_graph import StepGraph, Transfer, add_lanes


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, from ``start`` to ``end`` in seconds, on a clock that all ranks
    share.
    """

    rank: int
    action: Action
    start: float
    end: float


def window_of(spans: Sequence[Span]) -> tuple[float, float]:
    """(first start, last end) in seconds; zeros without spans."""
    if not spans:
        return 0.0, 0.0
    return min(span.start for span in spans), max(span.end for span in spans)


@dataclass(frozen=True)
class Timeline:
    """The spans of one step over ``ranks`` ranks.

    ``crosses_step``: see ``Schedule``. ``bounds``: (first start, last end) over all ranks, if
    ``spans`` has only some ranks. ``audits``: when actions ran again in waits; they count as idle.
    """

    ranks: int
    spans: tuple[Span, ...]
    crosses_step: bool = False
    bounds: tuple[float, float] | None = None
    audits: tuple[Span, ...] = ()

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end over all ranks; 0 without spans."""
        start, end = self.bounds or window_of(self.spans)
        return end - start

    @property
    def step_time(self) -> float:
        """Seconds from one step to the next if steps follow each other without a pause.

        If ranks wait for each other between steps, this is the makespan. Otherwise steps overlap,
        and it is the longest time from a rank's first start to its last end.
        """
        if not self.crosses_step:
            return self.makespan
        windows = map(window_of, self._spans_by_rank().values())
        return max((end - start for start, end in windows), default=0.0)

    def window(self, rank: int) -> tuple[float, float]:
        """(start, end) of the step on ``rank``, in seconds. If steps overlap, the window starts
        with the rank's first action.
        """
        spans = self._spans_by_rank()[rank] if self.crosses_step else []
        start, _ = window_of(spans or self.spans)
        return start, start + self.step_time

    def busy(self, rank: int) -> float:
        """Seconds in which ``rank`` computes (F, I, W, B); sends and receives do not count.

        Raises:
            ScheduleError: there is no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise ScheduleError(f"no rank {rank} in this timeline: expected 0 to {self.ranks - 1}")
        spans = self._spans_by_rank()[rank]
        return sum(span.end - span.start for span in spans if span.action.kind.is_compute)

    def bubble_ratio(self, rank: int | None = None) -> float:
        """Idle time over total time, from 0 to 1, of ``rank`` or as the mean over all ranks.

        Total time is the step time, the same for every rank, so a rank that ends early idles
        until the last one ends. 0 for an empty timeline.

        Raises:
            ScheduleError: there is no such rank.
        """
        ranks = range(self.ranks) if rank is None else (rank,)
        busy = sum(self.busy(number) for number in ranks)
        total = self.step_time * len(ranks)
        return 1.0 - busy / total if total > 0.0 else 0.0

    def _spans_by_rank(self) -> dict[int, list[Span]]:
        rows: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            rows[span.rank].append(span)
        return rows


def median_durations(steps: Iterable[Iterable[Span]]) -> dict[tuple[int, ActionKind], float]:
    """Median seconds of each kind of action of each stage, by (stage, kind).

    Args:
        steps: the spans of each step.
    """
    durations: dict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    for spans in steps:
        for span in spans:
            durations[span.action.stage, span.action.kind].append(span.end - span.start)
    return {key: statistics.median(values) for key, values in durations.items()}


# --- simulated ------------------------------------------------------------------------------------


Durations = Callable[[Action], float] | Mapping[tuple[int, ActionKind], float]


def simulate(
    schedule: Schedule,
    duration: Durations,
    *,
    transfer: Transfer | float = 0.0,
    wiring: Wiring | None = None,
    memory: Sequence[StageMemory] | None = None,
    collectives: Sequence[StageCollectives] = (),
) -> Timeline:
    """Discrete-event simulation of one step.

    Every rank runs its row in order. An action starts as soon as its rank is free and the results
    that the action needs have arrived. Sends cost the sender no time. The simulation takes time
    linear in the number of actions (plus one sort).

    Args:
        schedule: the schedule.
        duration: seconds of an action: a function of the action, or a mapping from
            ``(stage, kind)``.
        transfer: the links between ranks, or the seconds from the end of an action to the arrival
            of its result on another rank.
        wiring: the dataflow with its skip connections; None: a chain. As in the engine, there is
            one message for each stage that reads a result.
        memory: per stage, the memory of a microbatch, which moves transfer. Required if the links
            of moves have a bandwidth.
        collectives: per stage, the collectives over its parameters; empty: they take no time. Their
            actions are added to the schedule unless it has some.

    Returns:
        The timeline, from time 0, with spans sorted by start, then rank. The span of a move is the
        time of its transfer, on the rank whose row has the move. The spans of UNSHARD and
        REDUCE_GRAD are the times of their collectives.

    Raises:
        ScheduleError: the schedule deadlocks, a duration or the bytes of a message are missing, a
            time is negative or not finite, the wiring has another number of stages, or the bytes of
            a move are missing.
    """
    if not isinstance(transfer, Transfer):
        transfer = Transfer(latency=transfer)
    if wiring is not None and wiring.stage_count != schedule.stages:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.stages} stages, but the wiring has "
            f"{wiring.stage_count}: pass the wiring of the same stages"
        )
    dataflow = None if wiring is None else StageDataflow(schedule.stages, wiring)
    schedule = with_collectives(schedule, collectives)
    graph, rows = StepGraph(schedule, dataflow=dataflow, transfer=transfer), rows_of(schedule)
    seconds = [_seconds(action, duration) for action in graph.actions]
    lanes = add_lanes(graph, schedule, rows, seconds, transfer, memory)
    if collectives:
        add_collectives(lanes, collectives)
    _check_seconds(graph.actions, seconds)
    run = play(graph, lanes.rows, seconds)
    waits = waits_of(lanes, run)
    if waits:
        text = "".join(f"\n  {wait}" for wait in waits.values())
        raise ScheduleError(f"schedule {schedule.name!r} cannot run to its end:{text}")
    spans = [
        Span(rank, action, run.starts[number], run.starts[number] + seconds[number])
        for rank, row in enumerate(rows)
        for number in row
        if (action := graph.actions[number]).kind.is_compute
    ]
    spans += [Span(*span) for span in lanes.spans(run.starts)]
    spans.sort(key=lambda span: (span.start, span.rank))
    return Timeline(len(schedule.ranks), tuple(spans), schedule.crosses_step)


def _check_seconds(actions: Sequence[Action], seconds: Sequence[float]) -> None:
    for action, value in zip(actions, seconds, strict=True):
        if not (math.isfinite(value) and value >= 0.0):
            raise ScheduleError(
                f"the duration of {action} must be finite seconds >= 0, got {value!r}"
            )


def _seconds(action: Action, duration: Durations) -> float:
    """The duration of an action; 0 if it does not compute. A missing duration is refused."""
    if not action.kind.is_compute:
        return 0.0
    if not isinstance(duration, Mapping):
        return duration(action)
    key = (action.stage, action.kind)
    if key not in duration:
        raise ScheduleError(
            f"no duration for {action}: expected the key "
            f"({action.stage}, ActionKind.{action.kind.name}) in the mapping"
        )
    return duration[key]


@dataclass(frozen=True)
class Costs:
    """The costs of every stage, and of the messages between them.

    Attributes:
        times: per stage, seconds of F, I and W.
        memory: per stage, the memory of a microbatch.
        transfer: the links between ranks.
        wiring: the dataflow; None: a chain.
        collectives: per stage, the collectives over its parameters; empty: they take no time.

    Raises:
        ScheduleError: no stage; or times, memory, wiring and collectives have different numbers of
            stages.
    """

    times: Sequence[tuple[float, float, float]]
    memory: Sequence[StageMemory]
    transfer: Transfer = field(default_factory=Transfer)
    wiring: Wiring | None = None
    collectives: Sequence[StageCollectives] = ()

    def __post_init__(self) -> None:
        if not self.times or len(self.times) != len(self.memory):
            raise ScheduleError(
                f"Costs needs one entry of times and of memory for each stage; got "
                f"{len(self.times)} times and {len(self.memory)} memories"
            )
        if len(self.collectives) not in (0, len(self.times)):
            raise ScheduleError(
                f"Costs needs one entry of collectives for each of {len(self.times)} stages, or "
                f"none; got {len(self.collectives)}"
            )
        if self.wiring is not None and self.wiring.stage_count != len(self.times):
            raise ScheduleError(
                f"Costs has times of {len(self.times)} stages, but its wiring has "
                f"{self.wiring.stage_count}: pass the wiring of the same stages"
            )

    def in_chunks(self, chunks: int) -> Costs:
        """Return the costs with each stage cut into ``chunks`` equal ones.

        Raises:
            ScheduleError: the costs have a wiring, which is for the uncut stages.
        """
        if chunks == 1:
            return self
        if self.wiring is not None:
            raise ScheduleError(
                "stages with a wiring cannot be cut further: leave chunks at 1, or pass the costs "
                "and the wiring of smaller stages"
            )

        return replace(
            self,
            times=[
                (f / chunks, i / chunks, w / chunks)
                for f, i, w in self.times
                for _ in range(chunks)
            ],
            memory=[
                replace(m, saved=m.saved / chunks, deferred=m.deferred / chunks)
                for m in self.memory
                for _ in range(chunks)
            ],
            collectives=[
                replace(
                    c,
                    gather=c.gather / chunks,
                    reduction=c.reduction / chunks,
                    parts=max(1, c.parts // chunks),
                )
                for c in self.collectives
                for _ in range(chunks)
            ],
        )

    def seconds(self, action: Action) -> float:
        """The duration of ``action`` in seconds."""
        forward, inputs, weights = self.times[action.stage]
        if action.kind is ActionKind.BACKWARD_INPUT:
            return inputs
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return weights
        return inputs + weights if action.kind is ActionKind.BACKWARD else forward

    def timeline(self, schedule: Schedule) -> Timeline:
        """Simulate a step of ``schedule``.

        Raises:
            ScheduleError: the schedule deadlocks, or a duration or size that it needs is missing;
                see ``simulate``.
        """
        return simulate(
            schedule,
            self.seconds,
            transfer=self.transfer,
            wiring=self.wiring,
            memory=self.memory,
            collectives=self.collectives,
        )
