"""Timelines as one HTML file that needs nothing else: hover, follow a microbatch, see memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from autosplit.errors import AutosplitError
from autosplit.pipeline.ledger.bands import StepMemory, owners_of
from autosplit.pipeline.schedule.action import DEPARTURES
from autosplit.pipeline.simulation.timeline import Span, Timeline
from autosplit.text.writing import write_text

from .idle_gaps import Gap, gaps
from .memory_picture import COLOURS

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
