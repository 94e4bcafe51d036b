"""A plan as tables and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from autosplit.dump.tables import milliseconds
from autosplit.errors import AutosplitError
from autosplit.planner.cutting import NOT_COUNTED
from autosplit.planner.plan import Plan
from autosplit.planner.plan_search import Configuration
from autosplit.text.figures import few, size_text

from .pictures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MUTED = "#222222", "#666666"
# Okabe and Ito's palette, as in timelines.
_KINDS = (
    ("F  forward", "#0072B2", "white"),
    ("I  backward input", "#E69F00", "black"),
    ("W  backward weight", "#009E73", "white"),
)
_REST, _MOVING = "#BBBBBB", "#56B4E9"
_LONGEST = 40  # characters of the name of a block


def search_table(found: Sequence[Configuration], rows: int | None = None) -> str:
    """The best ``rows`` configurations that can run, and below them why each other one cannot."""
    able = [each for each in found if each.solution is not None][:rows]
    table = [[*_cells(each), each.lost or "the best"] for each in able]
    headers = ["schedule", "backward", "N", "M", "size", "memory", "step ms", "bubble", "peak", ""]
    align = ("left", "left", "right", "right", "right", "left", "right", "right", "right", "left")
    text = tabulate(table, headers, colalign=align, disable_numparse=True)
    left_out = sum(each.solution is not None for each in found) - len(able)
    if left_out:
        text += f"\n... and {left_out} more, none faster (--rows shows them)"
    return text


def refused_table(found: Sequence[Configuration]) -> str:
    """A line for each reason why a configuration cannot run; empty if all can."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in found:
        if each.solution is None:
            where = f"M={each.microbatches} {each.memory}" + (" fused" if each.fused else "")
            reasons.setdefault((f"{each.schedule} N={each.stages}", each.lost), []).append(where)
    return "\n".join(
        f"not {what} ({few(where, 3)}): {lost}" for (what, lost), where in reasons.items()
    )


def plan_table(plan: Plan) -> str:
    """A row a stage: its blocks, times, parameters and what it sends."""
    mean = sum(map(sum, plan.stage_times)) / plan.stages
    rows = [
        [
            str(stage),
            str(plan.placement[stage]),
            _short(first),
            _short(last),
            *map(milliseconds, plan.stage_times[stage]),
            f"{sum(plan.stage_times[stage]) / mean:.3f}x" if mean else "",
            size_text(round(plan.stage_parameters[stage])),
            size_text(round(plan.crossing[stage])) if stage < plan.stages - 1 else "",
        ]
        for stage, (first, last) in enumerate(spans(plan))
    ]
    headers = [
        "stage",
        "rank",
        "first block",
        "last block",
        "F ms",
        "I ms",
        "W ms",
        "of mean",
        "parameters",
        "sends",
    ]
    align = ("right", "right", "left", "left", *["right"] * 6)
    return tabulate(rows, headers, colalign=align, disable_numparse=True)


def measures_table(plan: Plan) -> str:
    """A row a measure of memory that the plan takes: what it costs, and saves on every rank; empty
    where it takes none.
    """
    if not plan.measures:
        return ""
    rows = [
        [name, f"+{milliseconds(seconds)}", *(size_text(round(size)) for size in saved)]
        for name, seconds, saved in plan.measures
    ]
    headers = ["measure", "step ms", *(f"rank {rank} less" for rank in range(plan.ranks))]
    align = ("left", *["right"] * (1 + plan.ranks))
    return tabulate(rows, headers, colalign=align, disable_numparse=True)


def source_line(plan: Plan, *, rehearsed: bool, estimated: bool) -> str:
    """The plan's step in words, and what its times are made of: after a rehearsal others than in
    the table of the search.
    """
    source = "measured block by block"
    if estimated:
        source = "estimated from FLOPs and bytes, nothing was measured"
    elif rehearsed:
        source = "rehearsed: run in whole steps; the search above goes by blocks"
    if plan.memory_limit is not None:
        source += f"; of memory, {NOT_COUNTED}"
    return (
        f"plan: {plan.schedule}, N={plan.stages}, M={plan.microbatches}, a step of "
        f"{milliseconds(plan.predicted_step)} ms; {source}"
    )


def spans(plan: Plan) -> list[tuple[str, str]]:
    """For each stage, the names of its first and last block."""
    blocks = plan.made_for.blocks
    firsts = [0, *map(blocks.index, plan.cuts), len(blocks)]
    return [(blocks[first], blocks[last - 1]) for first, last in pairwise(firsts)]


def draw_plan(plan: Plan, path: str | Path, *, title: str | None = None) -> None:
    """Draw the stages with their times, what goes over each cut, and the memory of every rank.

    The suffix of the file names the format.

    Raises:
        AutosplitError: no matplotlib, or a suffix that it has no format for.
        OutputError: the file cannot be written.
    """
    check_picture(path)
    height = 1.7 + 0.55 * max(plan.stages, plan.ranks)
    figure = new_figure("a plan", (13.0, height), layout="constrained")
    times, memory = figure.subplots(1, 2, width_ratios=(2.2, 1.0))
    _draw_times(times, plan)
    _draw_memory(memory, plan)
    figure.suptitle(title or _title(plan), x=0.01, ha="left", color=_INK, fontsize=11)
    save_figure(figure, path)


def check_picture(path: str | Path) -> None:
    """Refuse a file that ``draw_plan`` could not draw into.

    Raises:
        AutosplitError: no matplotlib, or a suffix that it has no format for.
    """
    known = new_figure("a plan", (1.0, 1.0)).canvas.get_supported_filetypes()
    suffix = Path(path).suffix.removeprefix(".")
    if suffix and suffix.lower() not in known:
        raise AutosplitError(f"no picture format {suffix!r} of {path}; known: {', '.join(known)}")


def _draw_times(axes: Axes, plan: Plan) -> None:
    """A bar a stage, F, I and W in turn; between two bars the bytes over the cut."""
    totals = [1e3 * sum(times) for times in plan.stage_times]
    widest = max(totals)
    for stage, times in enumerate(plan.stage_times):
        left = 0.0
        for (label, fill, ink), seconds in zip(_KINDS, times, strict=True):
            width = 1e3 * seconds
            axes.barh(
                stage,
                width,
                0.6,
                left,
                color=fill,
                label=label if stage == 0 else None,
                gid=f"{stage}/{label[0]}",
            )
            if width > 0.07 * widest:
                text = milliseconds(seconds)
                axes.text(left + width / 2, stage, text, color=ink, ha="center", va="center")
            left += width
        axes.text(
            left + 0.008 * widest,
            stage,
            milliseconds(sum(times)),
            color=_INK,
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )
    for cut, size in enumerate(plan.crossing):
        text = f"\N{DOWNWARDS ARROW} {size_text(round(size))}"
        axes.text(0.004 * widest, cut + 0.5, text, color=_MUTED, fontsize=8, va="center")
    mean = sum(totals) / len(totals)
    axes.axvline(mean, color=_INK, linewidth=0.8, linestyle=":", gid="mean")
    axes.set_xlim(0.0, 1.1 * widest)
    names = [
        f"{stage}: {_span(first, last)}, rank {plan.placement[stage]}"
        for stage, (first, last) in enumerate(spans(plan))
    ]
    _finish(axes, names, f"milliseconds a microbatch; slowest stage {widest / mean:.3f}x the mean")


def _draw_memory(axes: Axes, plan: Plan) -> None:
    """A bar a rank: what it holds all the time, and what is kept of microbatches."""
    unit, name = _unit(max(plan.peak_memory))
    widest = max(plan.peak_memory) / unit
    for rank, (resting, peak) in enumerate(zip(plan.resting_memory, plan.peak_memory, strict=True)):
        parts = (
            (resting, _REST, "parameters, gradients, optimizer"),
            (peak - resting, _MOVING, "microbatches"),
        )
        left = 0.0
        for size, fill, label in parts:
            axes.barh(
                rank,
                size / unit,
                0.6,
                left,
                color=fill,
                label=label if rank == 0 else None,
                gid=f"memory/{rank}/{label}",
            )
            left += size / unit
        axes.text(left + 0.015 * widest, rank, f"{left:,.2f}", color=_INK, va="center")
    axes.set_xlim(0.0, 1.18 * widest)
    _finish(axes, [f"rank {rank}" for rank in range(plan.ranks)], f"{name} at most")


def _finish(axes: Axes, names: Sequence[str], label: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8.5, color=_INK, parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(label, color=_MUTED, fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(
        frameon=False,
        fontsize=8.5,
        ncols=3,
        columnspacing=1.0,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
    )


def _title(plan: Plan) -> str:
    return (
        f"{plan.made_for.model}: {plan.stages} stages on {plan.ranks} ranks, {plan.schedule}, "
        f"{plan.microbatches} microbatches of {plan.microbatch_size}, memory {plan.memory!r}; "
        f"predicted step {milliseconds(plan.predicted_step)} ms, bubble {plan.bubble:.1%}"
    )


def _cells(one: Configuration) -> list[str]:
    found: Any = one.solution
    taken = ", ".join(effect.measure for effect in found.effects)
    return [
        f"{one.schedule} with {taken}" if taken else one.schedule,
        "fused" if one.fused else "split",
        str(one.stages),
        str(one.microbatches),
        str(one.microbatch_size),
        str(one.memory),
        milliseconds(found.step),
        f"{found.bubble:.1%}",
        size_text(round(max(found.peaks))),
    ]


def _unit(size: float) -> tuple[float, str]:
    """The unit in which a size has few digits."""
    for power, name in ((3, "GiB"), (2, "MiB")):
        if size >= 1024.0**power:
            return 1024.0**power, name
    return 1024.0, "KiB"


def _span(first: str, last: str) -> str:
    return _short(first) if first == last else f"{_short(first)}\nto {_short(last)}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}"
