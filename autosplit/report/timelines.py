"""Timelines as files: one HTML page that needs nothing else, to hover, follow a microbatch and see
memory; and a Chrome trace, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

The trace's format is the JSON object form of Google's "Trace Event Format".
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autosplit.errors import AutosplitError
from autosplit.pipeline.schedule.action import DEPARTURES, Action, ActionKind
from autosplit.pipeline.schedule.routes import needs_of, result_of
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.timeline import Span, Timeline
from autosplit.text.files import write_text, writing

from .timeline_picture import Rows, draw_timelines


@dataclass(frozen=True, slots=True)
class Gap:
    """Idle time of one rank, in seconds of the timeline's clock.

    Attributes:
        rank: who was idle.
        start: end of the action before, or the start of the step.
        end: start of the action after, or the end of the step.
        after: the action that the gap ended with; None at the end of the step.
        cause: what that action waited for: the last of its needs to be made on another rank, or
            the transfer that brought back what it uses; None where nothing had to come.
    """

    rank: int
    start: float
    end: float
    after: Span | None
    cause: Span | None


def gaps(timeline: Timeline) -> Iterator[Gap]:
    """The idle gaps of every rank, in order, ranks one after another.

    Where steps overlap, what is before a rank's first action and after its last belongs to others.
    """
    spans = [span for span in timeline.spans if span.action.kind.is_compute]
    if not spans:
        return
    whole = min(s.start for s in spans), max(s.end for s in spans)
    feeds = Feeds(1 + max(span.action.stage for span in spans))
    makers = {result_of(span.action): span for span in spans}
    backs: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.action.kind in (ActionKind.LOAD, ActionKind.RELOAD):
            backs[span.action.stage, span.action.microbatch].append(span)
    for rank in range(timeline.ranks):
        clock, end = timeline.window(rank) if timeline.crosses_step else whole
        for span in sorted((s for s in spans if s.rank == rank), key=lambda s: s.start):
            if span.start > clock:
                yield Gap(rank, clock, span.start, span, _cause(span, makers, backs, feeds))
            clock = max(clock, span.end)
        if end > clock:
            yield Gap(rank, clock, end, None, None)


def _cause(
    span: Span,
    makers: Mapping[Action, Span],
    backs: Mapping[tuple[int, int], Sequence[Span]],
    feeds: Feeds,
) -> Span | None:
    found = [makers[need] for need in needs_of(span.action, feeds) if need in makers]
    abroad = [maker for maker in found if maker.rank != span.rank]
    key = span.action.stage, span.action.microbatch
    abroad += [
        back
        for back in backs.get(key, ())
        if back.end <= span.start and span.action.kind is not ActionKind.FORWARD
    ]
    return max(abroad, key=lambda maker: maker.end, default=None)


_DATA = "/*DATA*/null"


def write_page(rows: Rows, path: str | Path, *, title: str = "Timeline") -> None:
    """Write a self-contained page: the timelines under each other, on one time scale.

    What moves microbatches' state between ranks or to the host is drawn below the actions of its
    rank. On the page: pointing at an action tells its times and what it waited for; a click follows
    its microbatch through all stages; pointing at an idle gap tells which action on which rank
    ended it; the wheel zooms.

    Raises:
        AutosplitError: no timeline, or one in which nothing is computed.
        OutputError: the file cannot be written.
    """
    if not rows:
        raise AutosplitError("nothing to show: expected at least one timeline")
    data = {"title": title, "panels": [_panel(*row) for row in rows]}
    template = resources.files(__package__).joinpath("timelines.html").read_text(encoding="utf-8")
    # "</script>" inside a name would end the page's script.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    write_text(path, template.replace(_DATA, text))


def _panel(name: str, timeline: Timeline) -> dict[str, Any]:
    spans = [span for span in timeline.spans if span.action.kind.is_compute]
    if not spans:
        raise AutosplitError(f"nothing to show: no rank computes in the timeline {name!r}")
    origin = min(span.start for span in spans)
    return {
        "name": name,
        "ranks": timeline.ranks,
        "makespan": _milliseconds(timeline.makespan),
        "overlappingStep": _milliseconds(timeline.step_time) if timeline.crosses_step else None,
        "bubble": [timeline.bubble_ratio(rank) for rank in range(timeline.ranks)],
        "meanBubble": timeline.bubble_ratio(),
        "spans": [_span(span, origin) for span in spans],
        "moves": [_span(span, origin) | {"lane": lane} for span, lane in _lanes(timeline)],
        "gaps": [_gap(gap, origin) for gap in gaps(timeline)],
    }


def _span(span: Span, origin: float) -> dict[str, Any]:
    return {
        "rank": span.rank,
        "text": str(span.action),
        "kind": span.action.kind.value,
        "stage": span.action.stage,
        "microbatches": span.action.microbatches,
        "start": _milliseconds(span.start - origin),
        "end": _milliseconds(span.end - origin),
    }


def _lanes(timeline: Timeline) -> Iterator[tuple[Span, int]]:
    """What moves microbatches' state, each in a lane of its rank that is free by then: what leaves
    above what arrives.
    """
    moves = [span for span in timeline.spans if span.action.kind.is_move]
    for rank in {span.rank for span in moves}:
        first = 0
        for leaves in (True, False):
            ends: list[float] = []
            mine = (s for s in moves if s.rank == rank and (s.action.kind in DEPARTURES) is leaves)
            for span in sorted(mine, key=lambda each: each.start):
                free = (lane for lane, end in enumerate(ends) if end <= span.start)
                lane = next(free, len(ends))
                ends[lane : lane + 1] = [span.end]
                yield span, first + lane
            first += len(ends)


def _gap(gap: Gap, origin: float) -> dict[str, Any]:
    return {
        "rank": gap.rank,
        "start": _milliseconds(gap.start - origin),
        "end": _milliseconds(gap.end - origin),
        "before": None if gap.after is None else str(gap.after.action),
        "cause": None if gap.cause is None else str(gap.cause.action),
        "causeRank": None if gap.cause is None else gap.cause.rank,
    }


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 6)


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


def write_chrome_trace(rows: Rows, path: str | Path) -> None:
    """Write a trace: one process a timeline, one thread a rank, one slice an action; the
    moves of memory and reductions of a rank have a thread of their own, for they go on meanwhile.

    Every timeline starts at 0. Arrows lead from an action to those on other ranks that need
    its result: activations from F to F, gradients from I or B back to I or B.

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
    text = f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n'
    write_text(path, text)


def _process(
    process: int, name: str, timeline: Timeline, arrow_ids: Iterator[int]
) -> Iterator[Event]:
    yield _metadata(process, "process_name", name=name)
    yield _metadata(process, "process_sort_index", sort_index=process)
    for rank in range(timeline.ranks):
        yield _metadata(process, "thread_name", rank, name=f"rank {rank}")
        yield _metadata(process, "thread_sort_index", rank, sort_index=rank)
    moving = sorted({span.rank for span in timeline.spans if span.action.kind.is_beside})
    for rank in moving:  # beside what the rank computes meanwhile
        yield _metadata(
            process, "thread_name", timeline.ranks + rank, name=f"rank {rank}: transfers"
        )
        yield _metadata(process, "thread_sort_index", timeline.ranks + rank, sort_index=rank)
    origin = min((span.start for span in timeline.spans), default=0.0)
    for span in timeline.spans:
        thread = span.rank + (timeline.ranks if span.action.kind.is_beside else 0)
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
        "args": {"stage": action.stage, **_microbatches(action)},
    }
    if action.kind in _COLOURS:
        event["cname"] = _COLOURS[action.kind]
    return event


def _microbatches(action: Action) -> dict[str, object]:
    if len(action.microbatches) == 1:
        return {"microbatch": action.microbatch}
    return {"microbatches": list(action.microbatches)}


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


def write_timeline(timeline: Timeline, path: str | Path, *, title: str = "Timeline") -> None:
    """Write what ran when, such as ``trainer.timeline()``, into a file; its suffix says as what.

    Args:
        timeline: of a step, measured or simulated.
        path: ``.html`` for a page that needs nothing else, ``.json`` for a Chrome trace, ``.pdf``,
            ``.png`` or ``.svg`` for a picture.
        title: of the page, or of the picture.

    Raises:
        AutosplitError: another suffix, nothing in it is computed, or no matplotlib for a picture.
        OutputError: the file cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        write_page([("", timeline)], path, title=title)
    elif suffix == ".json":
        write_chrome_trace([(title, timeline)], path)
    else:
        draw_timelines([("", timeline)], path, title=title)


def write_timelines(rows: Rows, folder: Path, *, title: str, page_rows: Rows = ()) -> list[Path]:
    """``timeline.html``, ``trace.json``, and ``timeline.png`` where matplotlib is there; returns
    the paths of those that were written.

    Args:
        rows: timelines and their names.
        folder: made where it is not there.
        title: of page and picture.
        page_rows: what the page shows; none: the rows.

    Raises:
        AutosplitError: nothing to show.
        OutputError: a file cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    names = ("timeline.html", "trace.json", "timeline.png")
    page, trace, picture = (folder / name for name in names)
    write_page(page_rows or rows, page, title=title)
    write_chrome_trace(rows, trace)
    if find_spec("matplotlib") is None:
        return [page, trace]
    draw_timelines(rows, picture, title=title)
    return [page, trace, picture]
