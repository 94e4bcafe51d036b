"""Every schedule on two ranks that compute for real, against what the simulator says of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autosplit.compare.workload import Workload, load_workload
from autosplit.pipeline import RunOptions
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.timeline import Timeline, median_durations
from autosplit.pipeline.trainer import PipelineTrainer

from ..results import Rows, table

RANKS = 2
MICROBATCHES = 4
FACTORY = "examples.models:llama"
TARGET = 1.03
SHORTEST = 0.02  # seconds of the actions that the target is for

_EMPTY = (0, ActionKind.BACKWARD_INPUT)  # the first stage has no input gradient


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule by its name, and how many stages a rank holds."""

    name: str
    schedule: str
    chunks: int
    split: bool = True


@dataclasses.dataclass(frozen=True)
class Row:
    """Medians over steps, in seconds.

    Attributes:
        name: of the case.
        measured: from the first action's start to the last one's end.
        replayed: of ``measured`` over the simulation with the same step's own durations.
        simulated: of ``measured`` over the simulation with the step's median durations by stage
            and kind of action.
        shortest: the median duration of the shortest action that computes anything.
        bubble: share of the ranks' time.
    """

    name: str
    measured: float
    replayed: float
    simulated: float
    shortest: float
    bubble: float


def cases() -> list[Case]:
    """All that two ranks and four microbatches admit, with one copy of the stages."""
    found = []
    for name, family in SCHEDULES.items():
        if name in ("dualpipe", "chimera"):  # two copies
            continue
        chunks = family.chunks or 2
        if family.fused:
            found.append(Case(f"{name}, fused", name, chunks, split=False))
        found.append(Case(name, name, chunks))
    return [*found, Case("auto", "auto", 1), Case("auto, 2 stages a rank", "auto", 2)]


def measure_all(steps: int) -> Rows:
    """Every case."""
    return [dataclasses.asdict(row) for row in measure(cases(), {}, steps)]


def measure(chosen: Sequence[Case], overrides: dict[str, str], steps: int) -> list[Row]:
    """Each case in turn, one launch of two processes with one thread each."""
    args = (list(chosen), overrides, steps)
    return launch(_on_rank, RANKS, args, timeout=600.0)[0]


def _on_rank(chosen: list[Case], overrides: dict[str, str], steps: int) -> list[Row]:
    workload = load_workload(FACTORY, overrides)
    return [_run(case, workload, steps) for case in chosen]


def _run(case: Case, workload: Workload, steps: int) -> Row:
    stages = RANKS * case.chunks
    trainer = PipelineTrainer(
        lambda index: workload.stage_fn(index, stages),
        workload.loss_fn,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        stages=stages,
        microbatches=MICROBATCHES,
        schedule=case.schedule,
        run_options=RunOptions(split_backward=case.split, timeout=120.0, record=True),
    )
    batch = workload.batch_fn(0, MICROBATCHES * workload.microbatch_size)
    steps_run: list[Timeline] = []
    with trainer:
        for _ in range(4 if case.schedule == "auto" else 2):
            trainer.step(batch)
        for _ in range(steps):
            dist.barrier()
            trainer.step(batch)
            steps_run.append(trainer.timeline())
        schedule = trainer.schedule
    medians = median_durations(each.spans for each in steps_run)
    measured = [each.makespan for each in steps_run]
    ideals = [simulate(schedule, median_durations([each.spans])).makespan for each in steps_run]
    replays = [simulate(schedule, _own(each).__getitem__).makespan for each in steps_run]
    return Row(
        case.name,
        statistics.median(measured),
        statistics.median(a / b for a, b in zip(measured, replays, strict=True)),
        statistics.median(a / b for a, b in zip(measured, ideals, strict=True)),
        min(seconds for key, seconds in medians.items() if key != _EMPTY),
        statistics.median(each.bubble_ratio() for each in steps_run),
    )


def _own(timeline: Timeline) -> dict[Action, float]:
    """How long each action of a step took."""
    return {span.action: span.end - span.start for span in timeline.spans}


def render(rows: Rows) -> str:
    """A row for each case."""
    headers = ["schedule", "measured ms", "over simulated", "over replayed", "bubble", "shortest"]
    cells = [
        [
            row["name"],
            f"{1e3 * row['measured']:.0f}",
            _judged(row["simulated"], row["shortest"]),
            _judged(row["replayed"], row["shortest"]),
            f"{row['bubble']:.1%}",
            f"{1e3 * row['shortest']:.0f} ms",
        ]
        for row in rows
    ]
    return table(headers, cells)


def _judged(ratio: float, shortest: float) -> str:
    text = f"{ratio:.3f}"
    return text if ratio <= TARGET or shortest < SHORTEST else f"**{text}**"
