"""Timelines as a picture: one panel each on a common time axis, ranks as rows, idle hatched.

Labels of the bars of a drawn timeline, by the room that the bars leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.errors import AutosplitError
from autosplit.pipeline.schedule.action import Action, ActionKind, numbered
from autosplit.pipeline.simulation.timeline import Span, Timeline

from .pictures import check_format, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class BarLabels:
    """One kind of text and font size for all bars of a panel: labels that come and go read badly.

    Attributes:
        text: of an action.
        size: of the font, in points.
        least: width in points of the narrowest bar that is labelled.
    """

    text: Callable[[Action], str]
    size: float
    least: float


def choose_labels(timeline: Timeline, points_per_second: float) -> BarLabels:
    """The most telling form that fits the usual bar of every kind, else the smallest form.

    Kind and microbatch ("F0"), or only the microbatch where bars are narrow; the whole action
    ("2F0") where a rank holds several stages.
    """
    spans = [span for span in timeline.spans if span.action.kind.is_compute]
    # The bar of several W in one call is as long as they are, and so has room for its text.
    single = [span for span in spans if len(span.action.microbatches) == 1]
    usual = points_per_second * _usual_duration(timeline)
    choices: list[tuple[Callable[[Action], str], float]]
    if _several_stages_on_a_rank(timeline):
        choices = [(str, 8.0), (str, 6.5), (str, 5.5)]
    else:
        choices = [(_kind_and_microbatch, 8.0), (_kind_and_microbatch, 6.5)]
        choices += [(_microbatch, 8.0), (_microbatch, 6.5), (_microbatch, 5.5)]
    for form, size in choices:
        least = 2.0 + size * max(_ems(form(span.action)) for span in single or spans)
        if least <= usual:
            break
    return BarLabels(form, size, 0.95 * least)


def _usual_duration(timeline: Timeline) -> float:
    """Seconds: the upper median of each kind of action, the least of these.

    Upper, because the I of a first stage takes no time and must not silence the others.
    """
    durations: dict[ActionKind, list[float]] = {}
    for span in timeline.spans:
        if span.action.kind.is_compute:
            durations.setdefault(span.action.kind, []).append(span.end - span.start)
    return min(sorted(each)[len(each) // 2] for each in durations.values())


def _several_stages_on_a_rank(timeline: Timeline) -> bool:
    held = {(span.rank, span.action.stage) for span in timeline.spans}
    return len(held) > len({rank for rank, _ in held})


def _ems(text: str) -> float:
    """Width in units of the font size: a digit of the default font takes 0.64, a W 0.99."""
    return 0.64 * len(text) + 0.35 * text.count(ActionKind.BACKWARD_WEIGHT.value)


def _kind_and_microbatch(action: Action) -> str:
    return f"{action.kind.value}{_microbatch(action)}"


def _microbatch(action: Action) -> str:
    return numbered(action.microbatches)


Rows = Sequence[tuple[str, Timeline]]
"""Timelines and their names, drawn from top to bottom."""


@dataclass(frozen=True)
class _Style:
    label: str
    fill: str
    ink: str  # of the text inside the bar


# Okabe and Ito's palette: told apart under every common colour blindness.
_STYLES = {
    ActionKind.FORWARD: _Style("F  forward", "#0072B2", "white"),
    ActionKind.BACKWARD_INPUT: _Style("I  backward input", "#E69F00", "black"),
    ActionKind.BACKWARD_WEIGHT: _Style("W  backward weight", "#009E73", "white"),
    ActionKind.BACKWARD: _Style("B  full backward", "#CC79A7", "black"),
    ActionKind.RECOMPUTE: _Style("recompute", "#56B4E9", "black"),
    ActionKind.UNSHARD: _Style("parameters gathered", "#999999", "black"),
}
_MOVES = {
    ActionKind.EVICT: _Style("to the partner", "#D55E00", "white"),
    ActionKind.RETURN: _Style("back from it", "#F0E442", "black"),
    ActionKind.OFFLOAD: _Style("to the host", "#D55E00", "white"),
    ActionKind.RELOAD: _Style("back from it", "#F0E442", "black"),
    ActionKind.REDUCE_GRAD: _Style("gradients to replicas", "#222222", "white"),
}
"""Each transfer once, where it is sent: a thin line below the bars of the rank."""
_IDLE: dict[str, Any] = {
    "facecolor": "#F4F4F4",
    "edgecolor": "#CFCFCF",
    "hatch": "////",
    "linewidth": 0.0,
}
_INK, _MUTED = "#222222", "#666666"
_POINTS = 72.0  # in an inch
_BAR = 0.82  # height of a bar in rows
_LINE = 0.09  # and of a transfer


@dataclass(frozen=True)
class _PageLayout:
    """Inches. Laid out by hand, so that a row is as high in a panel of one as of eight."""

    width: float
    row: float
    top: float
    left: float = 0.8
    right: float = 1.0
    panel_title: float = 0.48
    bottom: float = 0.55

    @property
    def axes_width(self) -> float:
        return self.width - self.left - self.right

    def height(self, rows: Rows) -> float:
        panels = sum(self.panel_title + timeline.ranks * self.row for _, timeline in rows)
        return self.top + panels + self.bottom


def draw_timelines(rows: Rows, path: str | Path, *, title: str | None = None) -> None:
    """Draw `timeline_figure(rows, title=title)` into a file; its suffix names the format.

    Raises:
        AutosplitError: a suffix other than .pdf, .png and .svg, nothing to draw, or no
            matplotlib.
        OutputError: the file cannot be written.
    """
    check_format(path, "timelines")
    save_figure(timeline_figure(rows, title=title), path)


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
    layout = _layout(rows, title)
    figure = new_figure("timelines", (layout.width, layout.height(rows)))
    end = 1e3 * max(timeline.makespan for _, timeline in rows)
    panels = _add_panels(figure, layout, rows, end)
    for index, (axes, (name, timeline)) in enumerate(zip(panels, rows, strict=True)):
        _draw_panel(axes, index, name, timeline, _POINTS * layout.axes_width / end)
    panels[-1].set_xlabel("milliseconds", color=_MUTED, fontsize=9)
    _draw_header(figure, layout, rows, title)
    return figure


def _layout(rows: Rows, title: str | None) -> _PageLayout:
    ranks = sum(timeline.ranks for _, timeline in rows)
    busiest = max(
        max(Counter(span.rank for span in timeline.spans).values()) for _, timeline in rows
    )
    return _PageLayout(
        width=min(22.0, max(11.0, 2.0 + 0.2 * busiest)),
        row=min(0.42, max(0.2, 14.0 / ranks)),
        top=0.32 if title is None else 0.72,
    )


def _add_panels(figure: Figure, layout: _PageLayout, rows: Rows, end: float) -> list[Axes]:
    panels: list[Axes] = []
    height = layout.height(rows)
    top = height - layout.top
    for _, timeline in rows:
        size = timeline.ranks * layout.row
        top -= layout.panel_title + size
        box = (
            layout.left / layout.width,
            top / height,
            layout.axes_width / layout.width,
            size / height,
        )
        axes = figure.add_axes(box)
        axes.set_xlim(0.0, end)
        axes.set_ylim(timeline.ranks - 0.5, -0.5)
        axes.set_yticks(range(timeline.ranks), [f"rank {r}" for r in range(timeline.ranks)])
        axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=_INK)
        axes.tick_params(axis="x", labelsize=8.5, color=_MUTED, labelcolor=_MUTED)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_MUTED)
        axes.xaxis.set_major_formatter("{x:,g}")
        panels.append(axes)
    for axes in panels[:-1]:
        axes.tick_params(labelbottom=False)
    return panels


def _draw_panel(
    axes: Axes, index: int, name: str, timeline: Timeline, points_per_ms: float
) -> None:
    from matplotlib.patches import Rectangle

    makespan = 1e3 * timeline.makespan
    stats = f"makespan {_milliseconds(makespan)}    bubble {_percent(timeline.bubble_ratio())}"
    if timeline.crosses_step:
        step = _milliseconds(1e3 * timeline.step_time)
        stats = stats.replace("    ", f"    steps overlap, one every {step}    ")
    origin = min(span.start for span in timeline.spans)
    text: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "parse_math": False,
    }
    axes.annotate(
        name, (0, 1), (0, 6), color=_INK, fontsize=11, fontweight="bold", va="bottom", **text
    )
    axes.annotate(stats, (1, 1), (0, 6), color=_INK, fontsize=10, ha="right", va="bottom", **text)
    for rank in range(timeline.ranks):
        start, end = (1e3 * (at - origin) for at in timeline.window(rank))
        idle = Rectangle((start, rank - _BAR / 2), end - start, _BAR, **_IDLE)
        idle.set_gid(f"{index}/{rank}/idle")
        axes.add_patch(idle)
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
    axes.axvline(makespan, color=_INK, linewidth=1.2, clip_on=False)
    _draw_bars(axes, index, timeline, points_per_ms)


def _draw_bars(axes: Axes, index: int, timeline: Timeline, points_per_ms: float) -> None:
    from matplotlib.patches import Rectangle

    origin = min(span.start for span in timeline.spans)
    labels = choose_labels(timeline, 1e3 * points_per_ms)
    for span in timeline.spans:
        if span.action.kind in _MOVES:
            _draw_move(axes, index, span, origin)
        if not span.action.kind.is_compute:
            continue
        style = _STYLES[span.action.kind]
        start, width = 1e3 * (span.start - origin), 1e3 * (span.end - span.start)
        points = width * points_per_ms
        bar = Rectangle(
            (start, span.rank - _BAR / 2),
            width,
            _BAR,
            facecolor=style.fill,
            edgecolor="white",
            linewidth=min(0.7, 0.1 * points),  # a full edge would hide a sliver
        )
        bar.set_gid(f"{index}/{span.rank}/{span.action}")
        axes.add_patch(bar)
        if points >= labels.least:
            axes.text(
                start + width / 2,
                span.rank,
                labels.text(span.action),
                color=style.ink,
                fontsize=labels.size,
                ha="center",
                va="center_baseline",
            )


def _draw_move(axes: Axes, index: int, span: Span, origin: float) -> None:
    from matplotlib.patches import Rectangle

    style = _MOVES[span.action.kind]
    back = span.action.kind in (ActionKind.RETURN, ActionKind.RELOAD)
    line = Rectangle(
        (1e3 * (span.start - origin), span.rank + _BAR / 2 - (_LINE if back else 2 * _LINE)),
        1e3 * (span.end - span.start),
        _LINE,
        facecolor=style.fill,
        linewidth=0.0,
    )
    line.set_gid(f"{index}/{span.rank}/{span.action}")
    axes.add_patch(line)


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100.0 else f"{value:.3g} ms"


def _percent(ratio: float) -> str:
    # A rank that never waits may miss 0 by a rounding error, which would print as -0.0%.
    return f"{max(0.0, ratio):.1%}"


def _draw_header(figure: Figure, layout: _PageLayout, rows: Rows, title: str | None) -> None:
    from matplotlib.patches import Patch

    left, height = layout.left / layout.width, layout.height(rows)
    if title is not None:
        figure.text(
            left, 1 - 0.18 / height, title, fontsize=13, color=_INK, va="top", parse_math=False
        )
    kinds = {span.action.kind for _, timeline in rows for span in timeline.spans}
    handles = [
        Patch(facecolor=style.fill, label=style.label)
        for kind, style in (*_STYLES.items(), *_MOVES.items())
        if kind in kinds
    ]
    handles.append(Patch(**_IDLE, label="idle"))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left, 1 - (layout.top - 0.2) / height),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.4,
        handleheight=1.0,
        columnspacing=1.8,
    )
