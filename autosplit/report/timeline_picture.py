"""Timelines as a picture: one panel each on a common time axis, ranks as rows, idle hatched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from autosplit.errors import AutosplitError
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.simulation.timeline import Span, Timeline
from autosplit.text.files import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = (".pdf", ".png", ".svg")

Rows = Sequence[tuple[str, Timeline]]
"""Timelines and their names, drawn from top to bottom."""


class _Style(NamedTuple):
    label: str
    fill: str
    ink: str = "black"  # of the text inside the bar
    place: float = -0.41  # of its upper edge, from the middle of its rank's row
    height: float = 0.82  # in rows


# Okabe and Ito's palette: told apart under every common colour blindness. Each transfer once, where
# it is sent: a thin line below the bars of the rank.
_STYLES = {
    ActionKind.FORWARD: _Style("F  forward", "#0072B2", "white"),
    ActionKind.BACKWARD_INPUT: _Style("I  backward input", "#E69F00"),
    ActionKind.BACKWARD_WEIGHT: _Style("W  backward weight", "#009E73", "white"),
    ActionKind.BACKWARD: _Style("B  full backward", "#CC79A7"),
    ActionKind.RECOMPUTE: _Style("recompute", "#56B4E9"),
    ActionKind.EVICT: _Style("to the partner", "#D55E00", "white", 0.23, 0.09),
    ActionKind.RETURN: _Style("back from it", "#F0E442", "black", 0.32, 0.09),
    ActionKind.OFFLOAD: _Style("to the host", "#D55E00", "white", 0.23, 0.09),
    ActionKind.RELOAD: _Style("back from it", "#F0E442", "black", 0.32, 0.09),
}
_IDLE: dict[str, Any] = {
    "facecolor": "#F4F4F4",
    "edgecolor": "#CFCFCF",
    "hatch": "////",
    "linewidth": 0.0,
}
_INK, _MUTED = "#222222", "#666666"
_SIZE = 7.5  # of the font in bars, in points: a letter takes up to two thirds of it
_MARGINS = 1.8  # inches beside the panels


def draw_timelines(rows: Rows, path: str | Path, *, title: str | None = None) -> None:
    """Draw ``timeline_figure(rows, title=title)`` into a file; its suffix names the format.

    Raises:
        AutosplitError: a suffix other than .pdf, .png and .svg, nothing to draw, or no
            matplotlib.
        OutputError: the file cannot be written.
    """
    if Path(path).suffix.lower() not in _FORMATS:
        raise AutosplitError(
            f"cannot draw timelines into {str(path)!r}: expected a name that ends in "
            f"{', '.join(_FORMATS)}"
        )
    figure = timeline_figure(rows, title=title)
    with writing(path):
        figure.savefig(path, dpi=150)


def timeline_figure(rows: Rows, *, title: str | None = None) -> Figure:
    """Panels under each other, one a timeline, each starting at 0 ms, all to one scale.

    A bar is one action (its gid is PANEL/RANK/ACTION, as in "0/1/1F0"), labelled with its
    kind and microbatch where there is room, or with the whole action where a rank holds
    several stages. What moves between partners or to the host is a thin line below the bars of
    the rank that sends it. The share of the makespan in which a rank computes nothing stands at
    the end of its row; sends and receives are not drawn and count as idle.

    Raises:
        AutosplitError: no timeline, one in which nothing is computed, or no matplotlib.
    """
    if not rows:
        raise AutosplitError("nothing to draw: expected at least one timeline")
    for name, timeline in rows:
        if not any(timeline.busy(rank) for rank in range(timeline.ranks)):
            raise AutosplitError(f"nothing to draw: no rank computes in the timeline {name!r}")
    heights = [timeline.ranks for _, timeline in rows]
    busiest = max(max(Counter(s.rank for s in each.spans).values()) for _, each in rows)
    width = min(22.0, max(11.0, 2.0 + 0.2 * busiest))
    height = 1.0 + min(0.42, max(0.2, 14.0 / sum(heights))) * sum(heights) + 0.4 * len(rows)
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise AutosplitError(
            f"drawing timelines needs matplotlib ({error}); run: pip install autosplit[plot]"
        ) from error
    # The object interface: pyplot would register the figure in global state and pick a display.
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    panels = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end = 1e3 * max(timeline.makespan for _, timeline in rows)
    panels[0].set_xlim(0.0, end)
    for index, (axes, (name, timeline)) in enumerate(zip(panels, rows, strict=True)):
        _draw_panel(axes, f"{index}", name, timeline)
        _draw_bars(axes, f"{index}", timeline, 72.0 * (width - _MARGINS) / end)
    panels[-1].set_xlabel("milliseconds", color=_MUTED)
    _draw_legend(figure, rows)
    if title is not None:
        figure.suptitle(title, color=_INK, parse_math=False)
    return figure


def _draw_panel(axes: Axes, index: str, name: str, timeline: Timeline) -> None:
    """All but the bars."""
    ranks, makespan = range(timeline.ranks), 1e3 * timeline.makespan
    axes.set_ylim(timeline.ranks - 0.5, -0.5)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", color=_MUTED, labelcolor=_MUTED)
    axes.spines[["top", "right", "left"]].set_visible(False)
    step = f"steps overlap, one every {_milliseconds(1e3 * timeline.step_time)}    "
    stats = (
        f"makespan {_milliseconds(makespan)}    {step if timeline.crosses_step else ''}"
        f"bubble {_percent(timeline.bubble_ratio())}"
    )
    axes.set_title(name, loc="left", color=_INK, fontweight="bold", parse_math=False)
    axes.set_title(stats, loc="right", color=_INK, fontsize=10)
    axes.axvline(makespan, color=_INK, linewidth=1.2, clip_on=False)
    origin = min(span.start for span in timeline.spans)
    for rank in ranks:
        start, end = (1e3 * (at - origin) for at in timeline.window(rank))
        idle = axes.barh(rank, end - start, 0.82, start, **_IDLE)[0]
        idle.set_gid(f"{index}/{rank}/idle")
        axes.annotate(
            f"{_percent(timeline.bubble_ratio(rank))} idle",
            (makespan, rank),
            (6, 0),
            textcoords="offset points",
            color=_MUTED,
            fontsize=9,
            va="center_baseline",
            annotation_clip=False,
        )


def _draw_bars(axes: Axes, index: str, timeline: Timeline, points_per_ms: float) -> None:
    origin = min(span.start for span in timeline.spans)
    several = len({(s.rank, s.action.stage) for s in timeline.spans}) > timeline.ranks
    widths = [1e3 * (s.end - s.start) for s in timeline.spans if s.action.kind.is_compute]
    # Labels that come and go read badly: where the usual bar is narrow, all are short.
    short = points_per_ms * median(widths) < _room("F00")
    for span in timeline.spans:
        style = _STYLES.get(span.action.kind)
        if style is None:
            continue
        start, width = 1e3 * (span.start - origin), 1e3 * (span.end - span.start)
        (bar,) = axes.barh(
            span.rank + style.place,
            width,
            style.height,
            start,
            align="edge",
            color=style.fill,
            edgecolor="white",
            # A full edge would hide a sliver.
            linewidth=min(0.7, 0.1 * width * points_per_ms, style.height),
        )
        bar.set_gid(f"{index}/{span.rank}/{span.action}")
        text = str(span.action) if several else _label(span, short=short)
        if span.action.kind.is_compute and width * points_per_ms >= _room(text):
            axes.text(
                start + width / 2,
                span.rank,
                text,
                color=style.ink,
                fontsize=_SIZE,
                ha="center",
                va="center_baseline",
            )


def _label(span: Span, *, short: bool) -> str:
    kind = "" if short else span.action.kind.value
    return f"{kind}{span.action.microbatch}"


def _room(text: str) -> float:
    """Points that a text takes."""
    return 2.0 + 0.7 * _SIZE * len(text)


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100.0 else f"{value:.3g} ms"


def _percent(ratio: float) -> str:
    # A rank that never waits may miss 0 by a rounding error, which would print as -0.0%.
    return f"{max(0.0, ratio):.1%}"


def _draw_legend(figure: Figure, rows: Rows) -> None:
    from matplotlib.patches import Patch

    kinds = {span.action.kind for _, timeline in rows for span in timeline.spans}
    shown = [style for kind, style in _STYLES.items() if kind in kinds]
    handles = [Patch(facecolor=style.fill, label=style.label) for style in shown]
    handles.append(Patch(**_IDLE, label="idle"))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False)
