"""Timelines as files: pictures, and Chrome traces for Perfetto (https://ui.perfetto.dev) or
chrome://tracing.

A trace's format is the JSON object form of Google's "Trace Event Format".
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autosplit.errors import AutosplitError
from autosplit.pipeline.ledger.bands import StepMemory
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.routes import needs_of, result_of
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.timeline import Span, Timeline
from autosplit.text.files import write_text, writing

from .timeline_picture import Rows, draw_timelines

Event = dict[str, Any]

# Names from the viewer's reserved palette, the nearest to the colours of the drawn timeline.
# chrome://tracing shows them; Perfetto colours slices by name.
_COLOURS = {
    ActionKind.FORWARD: "rail_response",  # blue
    ActionKind.BACKWARD_INPUT: "thread_state_iowait",  # orange
    ActionKind.BACKWARD_WEIGHT: "thread_state_running",  # green
    ActionKind.BACKWARD: "detailed_memory_dump",  # magenta
    ActionKind.RECOMPUTE: "thread_state_sleeping",
}


def write_chrome_trace(rows: Rows, path: str | Path, memory: StepMemory | None = None) -> None:
    """Write a trace: one process a timeline, labelled with its step and bubble, one thread a rank,
    one slice an action; the moves of memory and reductions of a rank have a thread of their own,
    for they go on meanwhile.

    Every timeline starts at 0. Arrows lead from an action to those on other ranks that need
    its result: activations from F to F, gradients from I or B back to I or B.

    Args:
        rows: timelines and their names.
        path: the file.
        memory: what ranks held in the first of them; a track a rank, with the bytes of each owner
            on top of each other.

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
        events += "".join(f",\n{json.dumps(event)}" for event in _held(memory, origin))
    text = f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n'
    write_text(path, text)


def _held(memory: StepMemory, origin: float) -> Iterator[Event]:
    for rank, bands in enumerate(memory.bands):
        for band in bands:
            yield {
                "ph": "C",
                "name": f"rank {rank}: bytes",
                "pid": 0,
                "ts": _microseconds(band.start - origin),
                "args": dict(band.held),
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
    moving = sorted({span.rank for span in timeline.spans if span.action.kind.is_move})
    for rank in moving:  # beside what the rank computes meanwhile
        yield _metadata(
            process, "thread_name", timeline.ranks + rank, name=f"rank {rank}: transfers"
        )
        yield _metadata(process, "thread_sort_index", timeline.ranks + rank, sort_index=rank)
    origin = min((span.start for span in timeline.spans), default=0.0)
    for span in timeline.spans:
        thread = span.rank + (timeline.ranks if span.action.kind.is_move else 0)
        yield _slice(process, span, origin, thread)
    for maker, consumer in _transfers(timeline):
        yield from _arrow(process, next(arrow_ids), maker, consumer, origin)


def _metadata(process: int, what: str, thread: int = 0, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _slice(process: int, span: Span, origin: float, thread: int) -> Event:
    action = span.action
    event: Event = {
        "ph": "X",
        "name": str(action),
        "cat": action.kind.name.lower(),
        "pid": process,
        "tid": thread,
        "ts": _microseconds(span.start - origin),
        "dur": _microseconds(span.end - span.start),
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }
    if action.kind in _COLOURS:
        event["cname"] = _COLOURS[action.kind]
    return event


def _transfers(timeline: Timeline) -> Iterator[tuple[Span, Span]]:
    """Pairs of spans on different ranks of which the second needs the first one's result."""
    feeds = Feeds(1 + max((span.action.stage for span in timeline.spans), default=0))
    makers = {result_of(span.action): span for span in timeline.spans}
    for consumer in timeline.spans:
        for need in needs_of(consumer.action, feeds):
            maker = makers.get(need)
            if maker is not None and maker.rank != consumer.rank:
                yield maker, consumer


def _arrow(
    process: int, number: int, maker: Span, consumer: Span, origin: float
) -> Iterator[Event]:
    """Start and end of an arrow.

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
    """Seconds from a slice's edge to its arrow: an arrow on the edge may bind to a neighbour."""
    return min(1e-6, (span.end - span.start) / 2)


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def write_timeline(
    timeline: Timeline,
    path: str | Path,
    *,
    title: str = "Timeline",
    memory: StepMemory | None = None,
) -> None:
    """Write what ran when, such as ``trainer.timeline()``, into a file; its suffix says as what.

    Args:
        timeline: of a step, measured or simulated.
        path: ``.json`` for a Chrome trace, to be opened in https://ui.perfetto.dev; ``.pdf``,
            ``.png`` or ``.svg`` for a picture.
        title: its name.
        memory: what ranks held meanwhile, as ``trainer.memory()`` tells it; traces show it.

    Raises:
        AutosplitError: another suffix, nothing in it is computed, memory for a picture, or no
            matplotlib for one.
        OutputError: the file cannot be written.
    """
    if Path(path).suffix.lower() == ".json":
        write_chrome_trace([(title, timeline)], path, memory)
    elif memory is not None:
        raise AutosplitError(f"traces show memory, pictures do not: name {str(path)!r} .json")
    else:
        draw_timelines([("", timeline)], path, title=title)


def write_timelines(rows: Rows, folder: Path, *, title: str, trace_rows: Rows = ()) -> list[Path]:
    """``trace.json``, and ``timeline.png`` where matplotlib is there; returns the paths of what was
    written.

    Args:
        rows: timelines and their names.
        folder: made where it is not there.
        title: of the picture.
        trace_rows: what the trace shows; none: the rows.

    Raises:
        AutosplitError: nothing to show.
        OutputError: a file cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    trace, picture = folder / "trace.json", folder / "timeline.png"
    write_chrome_trace(trace_rows or rows, trace)
    if find_spec("matplotlib") is None:
        return [trace]
    draw_timelines(rows, picture, title=title)
    return [trace, picture]
