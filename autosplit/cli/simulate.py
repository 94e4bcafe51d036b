"""``autosplit simulate``: all schedules side by side."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import click
from tabulate import tabulate

from autosplit.cli.options import folder_to_write, json_option, numbers, tell_written, typed_errors
from autosplit.dump.tables import milliseconds
from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import check_counts, check_size
from autosplit.pipeline.search.survey import MOST, SimulatedSchedule, Survey, survey
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.pipeline.validation.grid import format_schedule
from autosplit.report.timelines import write_timelines
from autosplit.text.files import write_text


def project(
    *,
    stages: int,
    microbatches: int,
    times: Sequence[float],
    memory: Sequence[float],
    chunks: int,
    latency: float,
    bandwidth: float | None,
    message: float | None,
    cap: float | None,
) -> Survey:
    """Simulate every schedule.

    Args:
        stages: one a rank.
        microbatches: in a step.
        times: milliseconds of F, I and W: three numbers, or three for each stage.
        memory: saved and deferred of a microbatch: two numbers, or two for each stage.
        chunks: stages a rank in interleaved schedules.
        latency: milliseconds of a transfer.
        bandwidth: gigabytes a second, if ``message`` is given.
        message: megabytes that a microbatch sends, if ``bandwidth`` is given.
        cap: the most that a rank may keep, in the unit of ``memory``.

    Raises:
        ScheduleError: numbers that are negative, not finite or not as many as expected, more
            actions than ``survey`` takes, or an option without an effect.
    """
    check_counts(stages=stages, microbatches=microbatches, chunks=chunks)
    check_size(stages * chunks, microbatches, MOST)
    if (bandwidth is None) != (message is None):
        raise ScheduleError("bandwidth and message have a meaning only together: give both")
    costs = Costs(
        [(f / 1e3, i / 1e3, w / 1e3) for f, i, w in _each("times", times, 3, stages)],
        [StageMemory(*pair) for pair in _each("memory", memory, 2, stages)],
        Transfer(
            latency / 1e3,
            math.inf if bandwidth is None else 1e9 * bandwidth,
            1e6 * (message or 0.0),
        ),
    )
    return survey(costs, microbatches, chunks=chunks, cap=cap)


def choose_schedule(found: Survey, name: str | None) -> SimulatedSchedule:
    """The shortest step within the cap, or of the schedule ``name`` if it is given.

    Raises:
        ScheduleError: no such schedule was simulated.
    """
    entries = [entry for entry in found.entries if name == entry.name]
    if name is None:
        entries = found.fitting
    if not entries:
        known = ", ".join(dict.fromkeys(entry.name for entry in found.entries))
        raise ScheduleError(
            f"no simulated schedule {name!r}; simulated: {known}. "
            + (found.refused.get(name, "") if name else "")
        )
    return min(entries, key=lambda entry: entry.timeline.step_time)


def _each(what: str, numbers: Sequence[float], size: int, stages: int) -> list[Sequence[float]]:
    """``size`` numbers for each stage."""
    if not all(math.isfinite(each) and each >= 0.0 for each in numbers):
        raise ScheduleError(f"{what} must be finite numbers >= 0, got {list(numbers)}")
    if len(numbers) == size:
        return [numbers] * stages
    if len(numbers) != size * stages:
        raise ScheduleError(
            f"{what} needs {size} numbers, or {size} for each of the {stages} stages: "
            f"{size * stages}; got {len(numbers)}"
        )
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]


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


@click.command()
@click.option("--stages", required=True, type=click.IntRange(min=1), help="Stages, one a rank.")
@click.option("--microbatches", required=True, type=click.IntRange(min=1), help="In a step.")
@click.option(
    "--times",
    required=True,
    callback=numbers,
    metavar="F,I,W[,F,I,W...]",
    help="Milliseconds of F, I and W: of every stage, or of each in turn.",
)
@click.option(
    "--memory",
    default="1,1",
    show_default=True,
    callback=numbers,
    metavar="SAVED,DEFERRED[,...]",
    help="What a stage keeps of a microbatch from F to I and from I to W, in any unit.",
)
@click.option(
    "--chunks",
    default=2,
    show_default=True,
    type=click.IntRange(min=2),
    help="Stages a rank in interleaved schedules; each stage is cut into as many.",
)
@click.option("--latency", default=0.0, show_default=True, help="Milliseconds of a transfer.")
@click.option("--bandwidth", type=float, help="Of a link, in gigabytes a second.")
@click.option("--message", type=float, help="Megabytes of a microbatch between two stages.")
@click.option("--cap", type=float, help="Most that a rank may keep; what keeps more is no best.")
@click.option("--schedule", help="Draw this one's timeline; default: the shortest step's.")
@folder_to_write("--output", help="Folder for trace.json and timeline.png.")
@json_option
@typed_errors
def simulate(
    output: pathlib.Path | None,
    json_file: pathlib.Path | None,
    schedule: str | None,
    **options: Any,
) -> None:
    """Simulate every schedule on a pipeline of the given stages, and print them side by side."""
    found = project(**options)
    shown = choose_schedule(found, schedule)
    click.echo(survey_table(found))
    for name, reason in found.refused.items():
        click.echo(f"\nnot {name}: {reason}")
    if json_file:
        data = {"rows": survey_rows(found), "refused": found.refused}
        write_text(json_file, json.dumps(data, indent=2) + "\n")
    if output:
        title = f"{options['stages']} ranks, {options['microbatches']} microbatches, simulated"
        rows = [(f"{shown.name}, {shown.weights}", shown.timeline)]
        files = write_timelines(rows, output, title=title)
        tell_written(files)
    elif schedule:
        click.echo("\n" + format_schedule(shown.schedule))
