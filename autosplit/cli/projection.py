"""What ``autosplit simulate`` computes and writes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import check_counts, check_size
from autosplit.pipeline.search.survey import MOST, SimulatedSchedule, Survey, survey
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.report.schedule_table import draw_survey, survey_rows
from autosplit.report.timeline_page import Panel, write_page
from autosplit.report.timeline_picture import draw_timelines
from autosplit.report.trace import write_chrome_trace
from autosplit.text.files import write_text, writing


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
        cap: search the shortest step in which no rank keeps more; in the unit of ``memory``.

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


def write_rows(found: Survey, path: Path) -> None:
    """``rows`` as JSON, and ``refused``: why there is no row."""
    data = {"rows": survey_rows(found), "refused": found.refused}
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_pictures(found: Survey, shown: SimulatedSchedule, folder: Path) -> list[Path]:
    """Time against memory of all schedules; timeline and trace of one."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    kinds = ("pareto.png", "timeline.png", "timeline.html", "trace.json")
    files = [folder / name for name in kinds]
    name = f"{shown.name}, {shown.weights}"
    microbatches, ranks = shown.schedule.microbatches, len(shown.schedule.ranks)
    title = f"{ranks} ranks, {microbatches} microbatches, simulated"
    draw_survey(found, files[0], title=title)
    draw_timelines([(name, shown.timeline)], files[1], title=title)
    write_page([Panel(name, shown.timeline)], files[2], title=title)
    write_chrome_trace([(name, shown.timeline)], files[3])
    return files


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
