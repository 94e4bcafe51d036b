"""Why a rank stood still: each idle gap of a timeline and the result that ended it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.dependency import needs_of, result_of
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.timeline import Span, Timeline


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
