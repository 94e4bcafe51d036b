"""Draw timelines as pictures, and write them as pictures or traces.

A picture has one panel for each timeline, on a common time axis. Rows are ranks; idle is hatched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.chrome_trace import Rows, write_chrome_trace
from autosplit.errors import AutosplitError
from autosplit.pipeline.ledger.bands import StepMemory
from autosplit.pipeline.schedule.schedule import Action, ActionKind
from autosplit.pipeline.simulation.simulate import Timeline
from autosplit.text.files import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = (".pdf", ".png", ".svg")

# Okabe and Ito's palette, distinguishable under every common colour blindness: label, fill, and the
# colour of the text inside.
_STYLES = {
    ActionKind.FORWARD: ("F  forward", "#0072B2", "white"),
    ActionKind.BACKWARD_INPUT: ("I  backward input", "#E69F00", "black"),
    ActionKind.BACKWARD_WEIGHT: ("W  backward weight", "#009E73", "white"),
    ActionKind.BACKWARD: ("B  full backward", "#CC79A7", "black"),
}
_AGAIN = ("recompute", "#56B4E9", "black")
_IDLE: dict[str, Any] = {
    "facecolor": "#F4F4F4",
    "edgecolor": "#CFCFCF",
    "hatch": "////",
    "linewidth": 0.0,
}
_INK, _MUTED = "#222222", "#666666"
_AUDIT: dict[str, Any] = {
    "facecolor": "white",
    "edgecolor": _INK,
    "hatch": "xxxx",
    "linewidth": 1.0,
}
_TEXT_ON_HATCH = {"facecolor": "white", "linewidth": 0, "pad": 1.0}
_SIZE = 7.5  # of the font in bars, in points: a letter takes up to two thirds of it
_MARGINS = 1.8  # inches beside the panels


def draw_timelines(
    rows: Rows, path: str | Path, *, title: str | None = None, marked: Collection[Action] = ()
) -> None:
    """Draw ``timeline_figure(rows, ...)`` into a file; its suffix names the format.

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
    figure = timeline_figure(rows, title=title, marked=marked)
    with writing(path):
        figure.savefig(path, dpi=150)


def timeline_figure(
    rows: Rows, *, title: str | None = None, marked: Collection[Action] = ()
) -> Figure:
    """Draw one panel per timeline, each from 0 ms and all with one time scale.

    A bar is one action; its gid in the file is PANEL/RANK/ACTION, as in "0/1/1F0". If there is
    room, it is labelled with its kind and microbatch, or with the whole action if a rank has
    several stages. Later stages of a rank are lighter than its first. The end of each row shows the
    rank's idle share of the makespan. Moves and reductions are not drawn. Audits are hatched, with
    the gid PANEL/RANK/ACTION/again. Actions in ``marked`` have a red frame, also where they run
    again.

    Raises:
        AutosplitError: no timeline, a timeline without computation, or no matplotlib.
    """
    if not rows:
        raise AutosplitError("nothing to draw: expected at least one timeline")
    for name, timeline in rows:
        if not any(timeline.busy(rank) for rank in range(timeline.ranks)):
            raise AutosplitError(f"nothing to draw: no rank computes in the timeline {name!r}")
    heights = [timeline.ranks for _, timeline in rows]
    busiest = max(max(Counter(s.rank for s in timeline.spans).values()) for _, timeline in rows)
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
    end = 1e3 * max(_last_end(timeline) for _, timeline in rows)
    panels[0].set_xlim(0.0, end)
    for index, (axes, (name, timeline)) in enumerate(zip(panels, rows, strict=True)):
        _draw_panel(axes, f"{index}", name, timeline)
        _draw_bars(axes, f"{index}", timeline, 72.0 * (width - _MARGINS) / end, marked)
    panels[-1].set_xlabel("milliseconds", color=_MUTED)
    _draw_legend(figure, rows)
    if title is not None:
        figure.suptitle(title, color=_INK, parse_math=False)
    return figure


def _last_end(timeline: Timeline) -> float:
    """Seconds from the first start to the last end, also of audits after the last action."""
    origin = min(span.start for span in timeline.spans)
    return max([timeline.makespan, *(span.end - origin for span in timeline.audits)])


def _draw_panel(axes: Axes, index: str, name: str, timeline: Timeline) -> None:
    """Draw the bars, axes, title and idle times of a panel."""
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


def _draw_bars(
    axes: Axes,
    index: str,
    timeline: Timeline,
    points_per_ms: float,
    marked: Collection[Action],
) -> None:
    origin = min(span.start for span in timeline.spans)
    spans = [span for span in timeline.spans if span.action.kind.is_compute]
    chunks = _chunks(timeline)
    several = len(chunks) > timeline.ranks
    bars = [*((span, False) for span in spans), *((span, True) for span in timeline.audits)]
    for span, is_audit in bars:
        _, fill, ink = _STYLES.get(span.action.kind, _AGAIN)
        if chunk := chunks[span.rank, span.action.stage]:
            fill, ink = _lighter(fill, chunk), "black"
        start, width = 1e3 * (span.start - origin), 1e3 * (span.end - span.start)
        # A full edge would hide a sliver.
        edge = min(0.7, 0.1 * width * points_per_ms)
        style = {"facecolor": fill, "edgecolor": "white", "linewidth": edge}
        (bar,) = axes.barh(span.rank, width, 0.82, start, **(_AUDIT if is_audit else style))
        bar.set_gid(f"{index}/{span.rank}/{span.action}{'/again' * is_audit}")
        if span.action in marked:
            bar.set(edgecolor="red", linewidth=2.5, zorder=3)
        text = str(span.action)
        text = text if several else text.removeprefix(str(span.action.stage))
        if width * points_per_ms >= 2.0 + 0.7 * _SIZE * len(text):
            middle = start + width / 2
            axes.text(
                middle,
                span.rank,
                text,
                color=_INK if is_audit else ink,
                bbox=_TEXT_ON_HATCH if is_audit else None,
                zorder=4,
                fontsize=_SIZE,
                ha="center",
                va="center_baseline",
            )


def _chunks(timeline: Timeline) -> dict[tuple[int, int], int]:
    """Map (rank, stage) to the number of the stage among the stages of its rank, from 0."""
    pairs = sorted({(s.rank, s.action.stage) for s in timeline.spans if s.action.kind.is_compute})
    first = {rank: number for number, (rank, _) in reversed([*enumerate(pairs)])}
    return {pair: number - first[pair[0]] for number, pair in enumerate(pairs)}


def _lighter(color: str, chunk: int) -> str:
    """The color of a chunk, mixed with more white the later the chunk is."""
    share = 0.55**chunk
    channels = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - value)):02x}" for value in channels)


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100.0 else f"{value:.3g} ms"


def _percent(ratio: float) -> str:
    # A rank that never waits may miss 0 by a rounding error, which would print as -0.0%.
    return f"{max(0.0, ratio):.1%}"


def _draw_legend(figure: Figure, rows: Rows) -> None:
    from matplotlib.patches import Patch

    spans = [span for _, timeline in rows for span in timeline.spans]
    kinds = {span.action.kind for span in spans if span.action.kind.is_compute}
    drawn = {_STYLES.get(kind, _AGAIN) for kind in kinds}
    shown = [style for style in (*_STYLES.values(), _AGAIN) if style in drawn]
    handles = [Patch(facecolor=fill, label=label) for label, fill, _ in shown]
    if any(chunk for _, timeline in rows for chunk in _chunks(timeline).values()):
        handles.append(Patch(facecolor=_lighter(_MUTED, 1), label="lighter: a rank's later stages"))
    handles.append(Patch(**_IDLE, label="idle"))
    if any(timeline.audits for _, timeline in rows):
        handles.append(Patch(**_AUDIT, label="runs again: an audit"))
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False)


def write_timeline(
    timeline: Timeline,
    path: str | Path,
    *,
    title: str = "Timeline",
    memory: StepMemory | None = None,
) -> None:
    """Write a timeline, such as ``trainer.timeline()``, into a file; the suffix names the format.

    Args:
        timeline: the timeline of a step, measured or simulated.
        path: ``.json`` for a Chrome trace, to be opened in https://ui.perfetto.dev; ``.pdf``,
            ``.png`` or ``.svg`` for a picture.
        title: the title of the trace or picture.
        memory: the memory of the same step, as ``trainer.memory()`` returns it; only traces show
            it.

    Raises:
        AutosplitError: another suffix, a timeline without computation, memory for a picture, or
            matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    if Path(path).suffix.lower() == ".json":
        write_chrome_trace([(title, timeline)], path, memory)
    elif memory is not None:
        raise AutosplitError(
            f"traces show memory, pictures do not: give {str(path)!r} the suffix .json"
        )
    else:
        draw_timelines([("", timeline)], path, title=title)


def write_timelines(rows: Rows, folder: Path, *, title: str, trace_rows: Rows = ()) -> list[Path]:
    """Write ``trace.json``, and ``timeline.png`` if matplotlib is installed; return their paths.

    Args:
        rows: timelines and their names.
        folder: created if it does not exist.
        title: the title of the picture.
        trace_rows: timelines for the trace; default: ``rows``.

    Raises:
        AutosplitError: nothing to show.
        OutputError: a file cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    trace, picture = folder / "trace.json", folder / "timeline.png"
    write_chrome_trace(trace_rows or rows, trace)
    if find_spec("matplotlib") is None:
        return [trace]
    draw_timelines(rows, picture, title=title)
    return [trace, picture]
