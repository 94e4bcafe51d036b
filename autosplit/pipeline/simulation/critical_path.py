"""The critical path: the chain of actions that makes a step as long as it is."""

from __future__ import annotations

from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.routes import needs_of, result_of
from autosplit.pipeline.schedule.wiring import Feeds

from .timeline import Span, Timeline

_TOLERANCE = 1e-9  # of the makespan: times that differ by rounding are equal


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """Spans from the start of the step to its end, each waiting for the one before.

    An action waits for the action before it on its rank, or for a result that it needs; of two the
    path goes through the one that ends last, and through its own rank if both do. A gap between
    two spans of the path is the time of a transfer, of a result or of what was away.
    """
    computed = [span for span in timeline.spans if span.action.kind.is_compute]
    if not computed:
        return ()
    feeds = Feeds(1 + max(span.action.stage for span in computed))
    # By place, for slices that take no time may be equal spans.
    spans = sorted(computed, key=lambda span: (span.start, span.end))
    makers: dict[Action, int] = {}
    before: list[int | None] = []
    latest: dict[int, int] = {}
    for place, span in enumerate(spans):
        makers.setdefault(result_of(span.action), place)
        before.append(latest.get(span.rank))
        latest[span.rank] = place
    slack = _TOLERANCE * timeline.makespan
    path = [spans.index(max(computed, key=lambda span: span.end))]
    while spans[path[-1]].start > spans[0].start + slack:
        span, own = spans[path[-1]], before[path[-1]]
        if own is not None and spans[own].end >= span.start - slack:
            path.append(own)
            continue
        needed = [makers[need] for need in needs_of(span.action, feeds) if need in makers]
        waits = [
            each
            for each in needed
            if spans[each].rank != span.rank or spans[each].end >= span.start - slack
        ]
        if not waits and own is not None:
            waits = [own]  # what it waited for beside, a transfer, began behind that at the latest
        if not waits:
            break
        path.append(max(waits, key=lambda each: spans[each].end))
    return tuple(spans[place] for place in reversed(path))
