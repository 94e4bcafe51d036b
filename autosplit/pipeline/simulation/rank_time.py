"""What moves take of their own rank: in a simulated step, and in one that was measured.

A rank begins its departures and puts back what came itself. Where stages are on the CPU, threads
carry a transfer, which may take time from what the rank computes beside it. How the two share the
cores is for the system to say; here the rank gives up the whole of that time when the transfer
begins, which comes to the same end of both where it computes on. Where it waits next, for that
transfer or for another rank, the copy costs it nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import NamedTuple

from autosplit.pipeline.schedule.action import ARRIVALS, DEPARTURES, Action, ActionKind

from .timeline import Span
from .transfer import MoveCosts

_LEAVING = (ActionKind.OFFLOAD, ActionKind.EVICT)
_COMING = (ActionKind.RELOAD, ActionKind.LOAD)
_COPIES = (ActionKind.OFFLOAD, ActionKind.RELOAD)
_NO_USE = (ActionKind.FORWARD, ActionKind.RECOMPUTE)


class RankTime(NamedTuple):
    """What moves take of one rank.

    Attributes:
        own: by place in its row, seconds in which it begins a departure, or puts back what came.
        beside: places of the moves whose transfers run beside what the rank computes next.
    """

    own: dict[int, float]
    beside: AbstractSet[int]


def time_of_rank(row: Sequence[Action], costs: MoveCosts) -> RankTime:
    """What moves take of a rank.

    Args:
        row: of a legal schedule.
        costs: of all moves.
    """
    own: dict[int, float] = {}
    beside: set[int] = set()
    begun: dict[tuple[int, int], int] = {}
    back: set[tuple[int, int]] = set()
    computed = False
    for place, action in enumerate(row):
        kind, at = action.kind, (action.stage, action.microbatch)
        if kind in _LEAVING:
            own[place] = costs.leave
        elif kind in _COMING:
            back.add(at)
        if kind in DEPARTURES or kind in ARRIVALS:
            begun[at] = place
        elif kind is ActionKind.AWAIT:
            begun.pop(at, None)
        elif kind.is_compute:
            if at in back and kind not in _NO_USE:
                own[place] = costs.come
                back.discard(at)
                begun.pop(at, None)
            if computed:  # what is begun before that comes later, as nothing has left yet
                beside.update(begun.values())
            begun.clear()
            computed = True
    return RankTime(own, beside)


def undisturbed(spans: Sequence[Span], slowing: float) -> list[Span]:
    """Measured spans, each computation without what copies to and from its rank's store took of it.

    What goes to a partner is not known to the moment: its span begins where a rank is ready for it.

    Args:
        spans: of a step.
        slowing: see ``MoveCosts``. Of the time in which both are under way, the copy has had as
            much by itself as that leaves it.
    """
    if not slowing:
        return list(spans)
    share = slowing / (1.0 + slowing)
    moves = [span for span in spans if span.action.kind in _COPIES]
    copies = {
        rank: [*_together(span for span in moves if span.rank == rank)]
        for rank in {span.rank for span in spans}
    }
    return [
        replace(span, end=span.end - share * _beside(span, copies[span.rank]))
        if span.action.kind.is_compute
        else span
        for span in spans
    ]


def _together(spans: Iterable[Span]) -> Iterable[tuple[float, float]]:
    """When any of them was under way."""
    until = -float("inf")
    for start, end in sorted((span.start, span.end) for span in spans):
        if end > until:
            yield max(start, until), end
            until = end


def _beside(span: Span, copies: Iterable[tuple[float, float]]) -> float:
    """Seconds of a span in which something was copied."""
    return sum(max(0.0, min(end, span.end) - max(start, span.start)) for start, end in copies)
