"""The critical path: the chain of actions that makes a step as long as it is."""

from __future__ import annotations

from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.dependency import needs_of, result_of
from autosplit.pipeline.schedule.wiring import Feeds

from .timeline import Span, Timeline

_TOLERANCE = 1e-9  # of the makespan: times that differ by rounding are equal


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """Spans from the start of the step to its end, each waiting for the one before.

    An action waits for the action before it on its rank, or for a result that it needs; of two the
    path goes through the one that ends last, and through its own rank if both do. A gap between
    two spans of the path is the time of a transfer.
    """
    if not timeline.spans:
        return ()
    feeds = Feeds(1 + max(span.action.stage for span in timeline.spans))
    makers: dict[Action, Span] = {}
    before: dict[Span, Span] = {}
    latest: dict[int, Span] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.start, span.end)):
        makers.setdefault(result_of(span.action), span)
        if span.rank in latest:
            before[span] = latest[span.rank]
        latest[span.rank] = span
    slack = _TOLERANCE * timeline.makespan
    path = [max(timeline.spans, key=lambda span: span.end)]
    origin = min(span.start for span in timeline.spans)
    while path[-1].start > origin + slack:
        span = path[-1]
        own = before.get(span)
        if own is not None and own.end >= span.start - slack:
            path.append(own)
            continue
        needed = [makers[need] for need in needs_of(span.action, feeds) if need in makers]
        waits = [
            each for each in needed if each.rank != span.rank or each.end >= span.start - slack
        ]
        if not waits:
            break
        path.append(max(waits, key=lambda each: each.end))
    return tuple(reversed(path))
