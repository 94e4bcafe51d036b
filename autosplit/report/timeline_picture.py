"""Timelines as a picture: one panel each on a common time axis, ranks as rows, idle hatched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.errors import AutosplitError
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.simulation.timeline import Timeline
from autosplit.text.files import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = (".pdf", ".png", ".svg")

Rows = Sequence[tuple[str, Timeline]]
"""Timelines and their names, drawn from top to bottom."""


# Okabe and Ito's palette: told apart under every common colour blindness. Label, fill, and ink of
# the text inside.
_STYLES = {
    ActionKind.FORWARD: ("F  forward", "#0072B2", "white"),
    ActionKind.BACKWARD_INPUT: ("I  backward input", "#E69F00", "black"),
    ActionKind.BACKWARD_WEIGHT: ("W  backward weight", "#009E73", "white"),
    ActionKind.BACKWARD: ("B  full backward", "#CC79A7", "black"),
    ActionKind.RECOMPUTE: ("recompute", "#56B4E9", "black"),
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
    several stages. The share of the makespan in which a rank computes nothing stands at the end of
    its row; what goes on beside computation is in traces, and not drawn here.

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
    spans = [span for span in timeline.spans if span.action.kind in _STYLES]
    several = len({(span.rank, span.action.stage) for span in spans}) > timeline.ranks
    for span in spans:
        _, fill, ink = _STYLES[span.action.kind]
        start, width = 1e3 * (span.start - origin), 1e3 * (span.end - span.start)
        # A full edge would hide a sliver.
        edge = min(0.7, 0.1 * width * points_per_ms)
        (bar,) = axes.barh(
            span.rank, width, 0.82, start, color=fill, edgecolor="white", linewidth=edge
        )
        bar.set_gid(f"{index}/{span.rank}/{span.action}")
        text = str(span.action)
        text = text if several else text.removeprefix(str(span.action.stage))
        if width * points_per_ms >= 2.0 + 0.7 * _SIZE * len(text):
            middle = start + width / 2
            axes.text(
                middle,
                span.rank,
                text,
                color=ink,
                fontsize=_SIZE,
                ha="center",
                va="center_baseline",
            )


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100.0 else f"{value:.3g} ms"


def _percent(ratio: float) -> str:
    # A rank that never waits may miss 0 by a rounding error, which would print as -0.0%.
    return f"{max(0.0, ratio):.1%}"


def _draw_legend(figure: Figure, rows: Rows) -> None:
    from matplotlib.patches import Patch

    kinds = {span.action.kind for _, timeline in rows for span in timeline.spans}
    shown = [style for kind, style in _STYLES.items() if kind in kinds]
    handles = [Patch(facecolor=fill, label=label) for label, fill, _ in shown]
    handles.append(Patch(**_IDLE, label="idle"))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False)
