"""Simulated schedules as a table, as JSON, and as a picture of time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from autosplit.dump.tables import milliseconds
from autosplit.pipeline.search.survey import SimulatedSchedule, Survey

from .pictures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _FRONT = "#222222", "#0072B2"
_SLOWEST = 1.6  # of the shortest step: slower ones would press all others into a corner


def survey_table(survey: Survey) -> str:
    """A row a schedule: milliseconds, bubble, memory, and what is best marked with a star. Below
    it, what the columns mean and what can be compared with what.
    """
    front = {id(entry) for entry in pareto_front(survey.fitting)}
    shortest = min(entry.timeline.step_time for entry in survey.fitting)
    rows = [
        [
            entry.name,
            entry.weights,
            _held(entry),
            milliseconds(entry.timeline.step_time),
            f"{entry.timeline.step_time / shortest:.3f}x",
            f"{max(0.0, entry.timeline.bubble_ratio()):.1%}",
            f"{max(entry.peaks):,.2f}",
            "*" if id(entry) in front else "" if survey.fits(entry) else "over cap",
        ]
        for entry in survey.entries
    ]
    headers = [
        "schedule",
        "weights",
        "rank holds",
        "step ms",
        "of best",
        "bubble",
        "peak",
        "Pareto",
    ]
    align = ("left", "left", "left", "right", "right", "right", "right", "center")
    table = tabulate(rows, headers, colalign=align, disable_numparse=True)
    return "\n".join([table, "", *_notes(survey)])


def _notes(survey: Survey) -> list[str]:
    """What a reader of the table could take wrongly."""
    within = "" if survey.cap is None else " that keeps the cap"
    notes = [
        "weights     fused: full backwards (B); own: where the schedule itself has them",
        "rank holds  parts: of its stage, cut equally; copies: a stage of each of two models",
        "peak        what a microbatch leaves (--memory) on the fullest rank; no parameters",
        f"Pareto      *: no other row{within} is as fast and keeps as little",
    ]
    if overlapping := [entry for entry in survey.entries if entry.timeline.crosses_step]:
        names = ", ".join(dict.fromkeys(entry.name for entry in overlapping))
        longest = milliseconds(max(entry.timeline.makespan for entry in overlapping))
        notes.append(
            f"step ms     from one step to the next: steps of {names} overlap, and one\n"
            f"            by itself takes {longest} ms"
        )
    if survey.cap is not None:
        notes.append(
            f"            over cap: keeps more than {survey.cap:g} on a rank, counts as no best"
        )
    return notes


def _held(entry: SimulatedSchedule) -> str:
    if entry.copies > 1:
        return f"{entry.copies} copies"
    return "1 stage" if entry.parts == 1 else f"{entry.parts} parts"


def survey_rows(survey: Survey) -> list[dict[str, Any]]:
    """The same for JSON. Times are in milliseconds; ``bubble`` is a ratio."""
    return [
        {
            "schedule": entry.name,
            "weights": entry.weights,
            "stages_per_rank": entry.parts,
            "copies": entry.copies,
            "over_cap": not survey.fits(entry),
            "makespan": 1e3 * entry.timeline.makespan,
            "step_time": 1e3 * entry.timeline.step_time,
            "bubble": max(0.0, entry.timeline.bubble_ratio()),
            "bubble_by_rank": [
                max(0.0, entry.timeline.bubble_ratio(rank)) for rank in range(entry.timeline.ranks)
            ],
            "peak_memory": max(entry.peaks),
            "peak_memory_by_rank": list(entry.peaks),
        }
        for entry in survey.entries
    ]


def pareto_front(entries: Sequence[SimulatedSchedule]) -> list[SimulatedSchedule]:
    """The entries that no other beats in step time and peak memory, the shortest step first."""
    ordered = sorted(entries, key=lambda each: (each.timeline.step_time, max(each.peaks)))
    front: list[SimulatedSchedule] = []
    for entry in ordered:
        if not front or max(entry.peaks) < max(front[-1].peaks):
            front.append(entry)
    return front


def draw_survey(survey: Survey, path: str | Path, *, title: str | None = None) -> None:
    """Draw step time against peak memory, with the Pareto front as a line.

    The cap, where there is one, is a line too; the front keeps it. Schedules of more than 1.6 times
    the shortest step are named below the picture.

    Raises:
        AutosplitError: no matplotlib.
    """
    figure = new_figure("schedules", (9.0, 6.0), layout="constrained")
    from matplotlib.patheffects import withStroke

    axes = figure.add_subplot()
    limit = _SLOWEST * min(entry.timeline.step_time for entry in survey.fitting)
    shown = [entry for entry in survey.entries if entry.timeline.step_time <= limit]
    fitting = [entry for entry in shown if survey.fits(entry)]
    slow = dict.fromkeys(entry.name for entry in survey.entries if entry not in shown)
    _draw_front(axes, pareto_front(fitting))
    if survey.cap is not None:
        axes.axvline(survey.cap, color=_INK, linewidth=0.8, linestyle="--", label="cap", gid="cap")
    _draw_points(axes, shown, withStroke(linewidth=2.5, foreground="white"))
    note = f"\nslower than all shown: {', '.join(slow)}" if slow else ""
    axes.set_xlabel(f"peak memory of the fullest rank{note}", color=_INK)
    axes.set_ylabel("milliseconds a step", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(0.12)
    axes.legend(frameon=False, loc="upper right")
    if title is not None:
        axes.set_title(title, color=_INK, loc="left", parse_math=False)
    save_figure(figure, path)


def _draw_front(axes: Axes, front: Sequence[SimulatedSchedule]) -> None:
    axes.step(
        [max(entry.peaks) for entry in front],
        [1e3 * entry.timeline.step_time for entry in front],
        where="pre",
        color=_FRONT,
        linewidth=1.2,
        label="Pareto front",
        gid="front",
    )


def _draw_points(axes: Axes, entries: Sequence[SimulatedSchedule], halo: Any) -> None:
    """One dot a place; what lies on one place shares its label, legible on a neighbour's dot."""
    places: dict[tuple[float, float], list[str]] = {}
    for entry in entries:
        place = round(max(entry.peaks), 6), round(1e3 * entry.timeline.step_time, 6)
        several = entry.weights != "own" and any(
            other.name == entry.name and other is not entry for other in entries
        )
        places.setdefault(place, []).append(
            f"{entry.name} {entry.weights}" if several else entry.name
        )
    for (memory, time), names in places.items():
        axes.plot(memory, time, "o", color=_INK, markersize=5, gid="/".join(names))
        axes.annotate(
            ", ".join(names),
            (memory, time),
            (5, 4),
            textcoords="offset points",
            fontsize=8,
            color=_INK,
            parse_math=False,
            path_effects=[halo],
        )
