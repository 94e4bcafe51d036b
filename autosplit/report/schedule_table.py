"""Simulated schedules as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from autosplit.dump.tables import milliseconds
from autosplit.pipeline.search.survey import SimulatedSchedule, Survey


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
        "rank holds  parts: of its stage, cut equally",
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
    return "1 stage" if entry.parts == 1 else f"{entry.parts} parts"


def survey_rows(survey: Survey) -> list[dict[str, Any]]:
    """The same for JSON. Times are in milliseconds; ``bubble`` is a ratio."""
    return [
        {
            "schedule": entry.name,
            "weights": entry.weights,
            "stages_per_rank": entry.parts,
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
