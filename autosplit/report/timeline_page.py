"""Timelines as one HTML file that needs nothing else: hover, follow a microbatch, see memory.

Why a rank stood still: each idle gap of a timeline and the result that ended it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from autosplit.errors import AutosplitError
from autosplit.pipeline.ledger.bands import StepMemory, owners_of
from autosplit.pipeline.schedule.action import DEPARTURES, Action, ActionKind
from autosplit.pipeline.schedule.dependency import needs_of, result_of
from autosplit.pipeline.schedule.wiring import Feeds
from autosplit.pipeline.simulation.timeline import Span, Timeline
from autosplit.text.files import write_text

from .memory_picture import COLOURS


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


Curve = Sequence[tuple[float, float]]
"""(seconds on the timeline's clock, bytes held from then on), in order of time."""

_DATA = "/*DATA*/null"


@dataclass(frozen=True)
class Panel:
    """A timeline and what is shown with it.

    Attributes:
        name: its heading.
        timeline: what ran when.
        memory: per rank, the bytes held over time; empty for none.
        bands: what was measured of the same step, by owner; drawn in place of ``memory``.
    """

    name: str
    timeline: Timeline
    memory: Sequence[Curve] = ()
    bands: StepMemory | None = None


def write_page(panels: Sequence[Panel], path: str | Path, *, title: str = "Timeline") -> None:
    """Write a self-contained page: the panels under each other, on one time scale.

    What moves microbatches' state between ranks or to the host is drawn below the actions of its
    rank. On the page: pointing at an action tells its times and what it waited for; a click follows
    its microbatch through all stages; pointing at an idle gap tells which action on which rank
    ended it; the wheel zooms.

    Raises:
        AutosplitError: no panel, one in which nothing is computed, or one with memory of another
            number of ranks.
        OutputError: the file cannot be written.
    """
    if not panels:
        raise AutosplitError("nothing to show: expected at least one timeline")
    data = {"title": title, "panels": [_panel(panel) for panel in panels]}
    template = (
        resources.files(__package__).joinpath("timeline_page.html").read_text(encoding="utf-8")
    )
    # "</script>" inside a name would end the page's script.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    write_text(path, template.replace(_DATA, text))


def _panel(panel: Panel) -> dict[str, Any]:
    timeline = panel.timeline
    spans = [span for span in timeline.spans if span.action.kind.is_compute]
    if not spans:
        raise AutosplitError(f"nothing to show: no rank computes in the timeline {panel.name!r}")
    held = panel.memory if panel.bands is None else panel.bands.bands
    if held and len(held) != timeline.ranks:
        raise AutosplitError(
            f"{panel.name!r} has {timeline.ranks} ranks, but memory for {len(held)}"
        )
    origin = min(span.start for span in spans)
    return {
        "name": panel.name,
        "ranks": timeline.ranks,
        "makespan": _milliseconds(timeline.makespan),
        "overlappingStep": _milliseconds(timeline.step_time) if timeline.crosses_step else None,
        "bubble": [timeline.bubble_ratio(rank) for rank in range(timeline.ranks)],
        "meanBubble": timeline.bubble_ratio(),
        "spans": [_span(span, origin) for span in spans],
        "moves": [_span(span, origin) | {"lane": lane} for span, lane in _lanes(timeline)],
        "gaps": [_gap(gap, origin) for gap in gaps(timeline)],
        "memory": [
            [[_milliseconds(at - origin), held] for at, held in curve] for curve in panel.memory
        ],
        **({} if panel.bands is None else _bands(panel.bands, origin)),
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


def _bands(memory: StepMemory, origin: float) -> dict[str, Any]:
    """Totals as the panel's memory, and for each stretch what each owner has of it."""
    owners = [*owners_of(memory.bands)]
    return {
        "owners": [[owner, COLOURS[owner]] for owner in owners],
        "memory": [
            [[_milliseconds(band.start - origin), band.total] for band in bands]
            for bands in memory.bands
        ],
        "held": [
            [[band.held[owner] for owner in owners] for band in bands] for bands in memory.bands
        ],
    }


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
