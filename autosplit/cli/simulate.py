"""``autosplit simulate`` simulates all schedules, and prints them side by side."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
from tabulate import tabulate

from autosplit.cli.options import FOLDER, NUMBERS, json_option, tell_written, typed_errors
from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import AUTO, SCHEDULES
from autosplit.pipeline.schedule.schedule import Schedule, check_counts, check_size
from autosplit.pipeline.search.bounding import caps_of
from autosplit.pipeline.search.search import forms, search
from autosplit.pipeline.simulation.activation_memory import ROUNDING, StageMemory, peak_memory
from autosplit.pipeline.simulation.collectives import StageCollectives
from autosplit.pipeline.simulation.simulate import Costs, Timeline
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.pipeline.validation.grid import format_schedule
from autosplit.planner.cuts import CapError
from autosplit.report import write_timelines
from autosplit.text.figures import milliseconds
from autosplit.text.files import write_json

MOST = 200_000
"""Most actions of a step, over all chunks. More would take minutes and gigabytes to simulate."""


@dataclass(frozen=True)
class SimulatedSchedule:
    """One schedule in one form, fused or with one placement of W, and its simulated step.

    Attributes:
        name: the name of the schedule; ``"auto"`` for the shortest schedule that ``search`` finds.
        weights: the placement of W, ``"fused"``, ``"own"`` or ``"searched"``.
        schedule: the schedule.
        timeline: the simulated step.
        peaks: per rank, the peak memory.
        fits: whether the peaks are within the cap.
    """

    name: str
    weights: str
    schedule: Schedule
    timeline: Timeline
    peaks: tuple[float, ...]
    fits: bool

    @property
    def chunks(self) -> int:
        """The number of stages into which a rank's part of the model is cut."""
        return self.schedule.stages // len(self.schedule.ranks)


Survey = tuple[list[SimulatedSchedule], dict[str, str]]
"""The schedules that a pipeline admits, and the errors of the others, by name."""


def survey(costs: Costs, microbatches: int, *, chunks: int, cap: float) -> Survey:
    """Simulate every schedule in every form, and the shortest schedule that ``search`` finds.

    Args:
        costs: the costs of one stage per rank. For a schedule with C stages per rank, each of these
            stages is cut into C equal stages.
        microbatches: M >= 1.
        chunks: stages per rank, for schedules that admit any number.
        cap: the most memory of a rank.

    Raises:
        ScheduleError: a bad count, or no schedule within the cap.
    """
    ranks = len(costs.times)
    check_counts(microbatches=microbatches)
    caps_of(cap, ranks)
    entries: list[SimulatedSchedule] = []
    refused: dict[str, str] = {}
    for name, family in SCHEDULES.items():
        cut = costs.in_chunks(family.chunks or chunks)
        try:
            for weights, schedule in forms(name, cut.times, microbatches, ranks):
                entries.append(_simulated(name, weights, schedule, cut, cap))
        except ScheduleError as error:
            refused[name] = str(error)
    try:
        schedule = search(costs, microbatches, cap=cap)
        entries.append(_simulated(AUTO, "searched", schedule, costs, cap))
    except ScheduleError as error:
        refused[AUTO] = str(error)
    if not entries:
        raise ScheduleError(next(iter(refused.values())))
    if not any(entry.fits for entry in entries):
        least = min(max(entry.peaks) for entry in entries)
        raise CapError(
            f"no schedule is within the cap {cap:g}; the most frugal one needs {least:g} on its "
            "fullest rank: raise the cap, or cut the batch into more microbatches"
        )
    return entries, refused


def _simulated(
    name: str, weights: str, schedule: Schedule, costs: Costs, cap: float
) -> SimulatedSchedule:
    peaks = tuple(peak_memory(schedule, costs.memory))
    fits = max(peaks) <= cap * ROUNDING
    return SimulatedSchedule(name, weights, schedule, costs.timeline(schedule), peaks, fits)


def _per_stage(
    option: str, numbers: Sequence[float], size: int, stages: int
) -> list[Sequence[float]]:
    """Divide an option's numbers among the stages, ``size`` for each. If the option has ``size``
    numbers in all, every stage gets these.
    """
    if len(numbers) == size:
        return [numbers] * stages
    if len(numbers) != size * stages:
        raise ScheduleError(
            f"{option} needs {size} numbers, or {size} for each of the {stages} stages: "
            f"{size * stages}; got {len(numbers)}"
        )
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]


def choose_schedule(simulated: Survey, name: str | None) -> SimulatedSchedule:
    """Choose the schedule with the shortest step within the cap, or the schedule called ``name``.

    Raises:
        ScheduleError: no such schedule was simulated.
    """
    entries, refused = simulated
    named = [entry for entry in entries if (entry.fits if name is None else name == entry.name)]
    if not named:
        names = ", ".join(dict.fromkeys(entry.name for entry in entries))
        raise ScheduleError(
            f"no simulated schedule {name!r}; simulated: {names}. {refused.get(str(name), '')}"
        )
    return min(named, key=lambda entry: entry.timeline.step_time)


def survey_table(entries: Sequence[SimulatedSchedule]) -> str:
    """Text: a table with a row per schedule (milliseconds, bubble, memory, and a star for the
    Pareto front), and notes on its columns.
    """
    fitting = [entry for entry in entries if entry.fits]
    front = [id(entry) for entry in pareto_front(fitting)]
    shortest = min(entry.timeline.step_time for entry in fitting) or math.inf
    rows = [
        [
            entry.name,
            entry.weights,
            "1 stage" if entry.chunks == 1 else f"{entry.chunks} parts",
            milliseconds(entry.timeline.step_time),
            f"{entry.timeline.step_time / shortest:.3f}x",
            f"{max(0.0, entry.timeline.bubble_ratio()):.1%}",
            f"{max(entry.peaks):,.2f}",
            "*" if id(entry) in front else "" if entry.fits else "over cap",
        ]
        for entry in entries
    ]
    headers = ["schedule", "weights", "rank holds", "step ms", "of best", "bubble", "peak"]
    align = ("left", "left", "left", "right", "right", "right", "right", "center")
    table = tabulate(rows, [*headers, "Pareto"], colalign=align, disable_numparse=True)
    return "\n".join([table, "", *_notes(entries)])


def _notes(entries: Sequence[SimulatedSchedule]) -> Iterator[str]:
    """Yield notes on columns that could be misread."""
    yield "schedule    auto: the shortest that the search of a trainer finds, one stage a rank"
    yield "weights     fused: full backwards (B); own: the schedule places its own"
    yield "rank holds  parts: its stage, cut into equal parts"
    yield "peak        activations (--memory) on the fullest rank, without parameters"
    yield "Pareto      *: no other row within the cap is as fast with as little memory"
    if overlapping := [e for e in entries if e.timeline.makespan > e.timeline.step_time]:
        names = ", ".join(dict.fromkeys(entry.name for entry in overlapping))
        longest = milliseconds(max(entry.timeline.makespan for entry in overlapping))
        yield f"step ms     from one step to the next: steps of {names} overlap, and one"
        yield f"            by itself takes {longest} ms"
    if not all(entry.fits for entry in entries):
        yield "            over cap: a rank exceeds the cap"


def survey_rows(entries: Sequence[SimulatedSchedule]) -> list[dict[str, Any]]:
    """The simulated schedules as rows for JSON. Times are in milliseconds; ``bubble`` is a
    ratio.
    """
    return [
        {
            "schedule": entry.name,
            "weights": entry.weights,
            "stages_per_rank": entry.chunks,
            "over_cap": not entry.fits,
            "makespan": 1e3 * entry.timeline.makespan,
            "step_time": 1e3 * entry.timeline.step_time,
            "bubble": max(0.0, entry.timeline.bubble_ratio()),
            "peak_memory": entry.peaks,
        }
        for entry in entries
    ]


def pareto_front(entries: Sequence[SimulatedSchedule]) -> list[SimulatedSchedule]:
    """The entries that no other entry beats in both step time and peak memory, the shortest step
    first.
    """
    ordered = sorted(entries, key=lambda entry: (entry.timeline.step_time, max(entry.peaks)))
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
    type=NUMBERS,
    metavar="F,I,W[,F,I,W...]",
    help="Milliseconds of F, I and W: of every stage, or of each in turn.",
)
@click.option(
    "--memory",
    default="1,1",
    show_default=True,
    type=NUMBERS,
    metavar="SAVED,DEFERRED[,...]",
    help="Memory of a microbatch on a stage from F to I and from I to W, in any unit.",
)
@click.option(
    "--chunks",
    default=2,
    show_default=True,
    type=click.IntRange(min=2),
    help="Stages per rank in interleaved schedules; each stage is cut into as many.",
)
@click.option("--latency", default=0.0, show_default=True, help="Milliseconds of a transfer.")
@click.option("--bandwidth", type=float, help="Of a link, in gigabytes per second.")
@click.option("--message", type=float, help="Megabytes of a microbatch between two stages.")
@click.option(
    "--collectives",
    default="0,0",
    type=NUMBERS,
    metavar="GATHER,REDUCTION[,...]",
    help="Milliseconds to gather a stage's shards, and to reduce its gradients.",
)
@click.option("--buckets", default=1, type=click.IntRange(min=1), help="Parts of each of these.")
@click.option(
    "--regather", is_flag=True, help="Gather for each call, as reshard_after_forward=True."
)
@click.option(
    "--cap",
    default=math.inf,
    help="The most memory of a rank, in the unit of --memory.",
)
@click.option("--schedule", help="The schedule to draw; default: the one with the shortest step.")
@click.option("--output", type=FOLDER, help="For trace.json and timeline.png.")
@json_option
@typed_errors
def simulate(
    stages: int,
    microbatches: int,
    times: tuple[float, ...],
    memory: tuple[float, ...],
    chunks: int,
    latency: float,
    bandwidth: float | None,
    message: float | None,
    collectives: tuple[float, ...],
    buckets: int,
    regather: bool,
    cap: float,
    schedule: str | None,
    output: pathlib.Path | None,
    json_file: pathlib.Path | None,
) -> None:
    """Simulate every schedule on a pipeline of the given stages, and print them side by side."""
    check_size(stages * chunks, microbatches, MOST)
    if (bandwidth is None) != (message is None):
        raise ScheduleError("--bandwidth and --message work only together: give both")
    rate = math.inf if bandwidth is None else 1e9 * bandwidth
    costs = Costs(
        [(f / 1e3, i / 1e3, w / 1e3) for f, i, w in _per_stage("times", times, 3, stages)],
        [StageMemory(*pair) for pair in _per_stage("memory", memory, 2, stages)],
        Transfer(latency / 1e3, rate, 1e6 * (message or 0.0)),
        collectives=[
            StageCollectives(gather / 1e3, reduction / 1e3, buckets, regather)
            for gather, reduction in _per_stage("collectives", collectives, 2, stages)
        ]
        if any(collectives)
        else (),
    )
    simulated = entries, refused = survey(costs, microbatches, chunks=chunks, cap=cap)
    shown = choose_schedule(simulated, schedule)
    click.echo(survey_table(entries))
    for name, reason in refused.items():
        click.echo(f"\nnot {name}: {reason}")
    if json_file:
        data = {"rows": survey_rows(entries), "refused": refused}
        write_json(json_file, data)
    if output:
        title = f"{stages} ranks, {microbatches} microbatches, simulated"
        rows = [(f"{shown.name}, {shown.weights}", shown.timeline)]
        tell_written(write_timelines(rows, output, title=title))
    elif schedule:
        click.echo("\n" + format_schedule(shown.schedule))
