"""Write timelines as Chrome traces for Perfetto (https://ui.perfetto.dev).

A trace has the JSON object form of Google's "Trace Event Format".
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autosplit.errors import AutosplitError
from autosplit.pipeline.ledger.bands import StepMemory
from autosplit.pipeline.schedule.routes import StageDataflow, needs_of, result_of
from autosplit.pipeline.schedule.schedule import ActionKind
from autosplit.pipeline.simulation.simulate import Span, Timeline
from autosplit.text.files import write_text

Rows = Sequence[tuple[str, Timeline]]
"""Timelines and their names, shown from top to bottom."""
Event = dict[str, Any]


def write_chrome_trace(rows: Rows, path: str | Path, memory: StepMemory | None = None) -> None:
    """Write a trace with one process per timeline, labelled with its step and bubble, one thread
    per rank, and one slice per action. A rank's moves and reductions have a thread of their own,
    because they overlap with computation.

    Every timeline starts at 0. Arrows lead from an action to the actions on other ranks that need
    its result: activations from F to F, gradients from I or B to I or B.

    Args:
        rows: timelines and their names.
        path: the file.
        memory: the memory of the first timeline; one track per rank.

    Raises:
        AutosplitError: no timeline.
        OutputError: the file cannot be written.
    """
    if not rows:
        raise AutosplitError("nothing to trace: expected at least one timeline")
    arrow_ids = itertools.count(1)
    events = ",\n".join(
        json.dumps(event)
        for process, (name, timeline) in enumerate(rows)
        for event in _process(process, name, timeline, arrow_ids)
    )
    if memory is not None:
        origin = min(span.start for span in rows[0][1].spans)
        events += "".join(f",\n{json.dumps(event)}" for event in _memory_events(memory, origin))
    text = f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n'
    write_text(path, text)


def _memory_events(memory: StepMemory, origin: float) -> Iterator[Event]:
    for rank, bands in enumerate(memory.bands):
        for band in bands:
            yield {
                "ph": "C",
                "name": f"rank {rank}: bytes",
                "pid": 0,
                "ts": _microseconds(band.start - origin),
                "args": {"fixed": band.fixed, "activations": band.activations},
            }


def _process(
    process: int, name: str, timeline: Timeline, arrow_ids: Iterator[int]
) -> Iterator[Event]:
    yield _metadata(process, "process_name", name=name)
    step = f"{1e3 * timeline.step_time:.3g} ms, bubble {max(0.0, timeline.bubble_ratio()):.1%}"
    yield _metadata(process, "process_labels", labels=step)
    yield _metadata(process, "process_sort_index", sort_index=process)
    for rank in range(timeline.ranks):
        yield _metadata(process, "thread_name", rank, name=f"rank {rank}")
        yield _metadata(process, "thread_sort_index", rank, sort_index=rank)
    moving = sorted({span.rank for span in timeline.spans if not span.action.kind.is_compute})
    for rank in moving:  # moves and collectives overlap with the rank's computation
        yield _metadata(
            process, "thread_name", timeline.ranks + rank, name=f"rank {rank}: transfers"
        )
        yield _metadata(process, "thread_sort_index", timeline.ranks + rank, sort_index=rank)
    origin = min((span.start for span in timeline.spans), default=0.0)
    for span in timeline.spans:
        thread = span.rank + (0 if span.action.kind.is_compute else timeline.ranks)
        yield _slice(process, span, origin, thread)
    for span in timeline.audits:
        audit = _slice(process, span, origin, span.rank)
        yield {**audit, "name": f"{span.action} again", "cat": "audit"}
    for maker, consumer in _transfers(timeline):
        yield from _arrow(process, next(arrow_ids), maker, consumer, origin)


def _metadata(process: int, kind: str, thread: int = 0, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _slice(process: int, span: Span, origin: float, thread: int) -> Event:
    action = span.action
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind.name.lower(),
        "pid": process,
        "tid": thread,
        "ts": _microseconds(span.start - origin),
        "dur": _microseconds(span.end - span.start),
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }


def _transfers(timeline: Timeline) -> Iterator[tuple[Span, Span]]:
    """Yield pairs of spans on different ranks in which the second needs the first one's result."""
    dataflow = StageDataflow(1 + max((span.action.stage for span in timeline.spans), default=0))
    makers = {result_of(span.action): span for span in timeline.spans}
    for consumer in timeline.spans:
        for need in needs_of(consumer.action, dataflow):
            maker = makers.get(need)
            if maker is not None and maker.rank != consumer.rank:
                yield maker, consumer


def _arrow(
    process: int, number: int, maker: Span, consumer: Span, origin: float
) -> Iterator[Event]:
    """Yield the two trace events of an arrow: start and end.

    The id is a number because Perfetto reads a text as a hexadecimal number.
    """
    forward = maker.action.kind is ActionKind.FORWARD
    name = "activation" if forward else "gradient"
    common = {"name": name, "cat": "transfer", "pid": process, "id": number}
    leaves = maker.end - _nudge(maker) - origin
    arrives = consumer.start + _nudge(consumer) - origin
    yield {**common, "ph": "s", "tid": maker.rank, "ts": _microseconds(leaves)}
    # "bp": "e" binds the end to the slice around it; the default is the slice after it.
    yield {**common, "ph": "f", "bp": "e", "tid": consumer.rank, "ts": _microseconds(arrives)}


def _nudge(span: Span) -> float:
    """Seconds by which an arrow ends inside its action's slice. Perfetto may bind an arrow that
    ends on the slice's edge to the neighbouring slice.
    """
    return min(1e-6, (span.end - span.start) / 2)


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
