"""What a comparison runs, and what it found.

The table that ``autosplit compare`` prints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from autosplit.errors import PipelineError
from autosplit.pipeline.simulation.timeline import Timeline
from autosplit.text.figures import size_text

# Processes and threads of one machine; seconds of eleven days; what a table can hold.
_RANGES: dict[str, tuple[float, float]] = {
    "stages": (1, 10_000),
    "ranks": (1, 256),
    "steps": (1, 1_000_000),
    "warmup": (0, 1_000_000),
    "threads": (1, 1024),
    "learning_rate": (0.0, 1e6),
    "timeout": (0.001, 1e6),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to compare. Picklable: every rank gets a copy.

    Attributes:
        factory: ``MODULE:FACTORY`` that returns a model and the inputs of a microbatch.
        overrides: keyword settings for the factory.
        stages: number of pipeline stages.
        ranks: number of processes; fewer along a pipeline than stages puts several stages in one.
        schedules: schedule names; each is compared at each of ``microbatches``.
        microbatches: microbatches in a step.
        weights: where the split schedule puts weight gradients; None where suits it.
        steps: timed steps of each of the two, alternating.
        warmup: steps of each before the timed ones.
        learning_rate: of AdamW.
        threads: torch threads of each process.
        timeout: seconds to wait for another rank.
        backend: how the stages' graphs are run, see ``autosplit.split``.
        profiling: seconds of measuring what a whole model's blocks cost, to cut it by.
        dump: folder in which every rank dumps the graphs of its stages, or None.

    Raises:
        PipelineError: a number out of range, or nothing to compare.
    """

    factory: str
    overrides: Mapping[str, str]
    stages: int
    ranks: int
    schedules: tuple[str, ...]
    microbatches: tuple[int, ...]
    weights: str | None
    steps: int
    warmup: int
    learning_rate: float
    threads: int
    timeout: float
    backend: str = "eager"
    profiling: float = 10.0
    dump: str | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value < least:
                raise PipelineError(f"{name} must be at least {least}, got {value}")
            if not value <= most:  # NaN is neither
                raise PipelineError(f"{name} must be at most {most:,}, got {value:,}")
        for name in ("schedules", "microbatches"):
            if not getattr(self, name):
                raise PipelineError(f"{name} names nothing to compare: give one or more")

    @property
    def cases(self) -> list[tuple[str, int]]:
        """Schedules and numbers of microbatches, in the order in which they are compared."""
        return [(name, count) for name in self.schedules for count in self.microbatches]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the comparison.

    Attributes:
        schedule: schedule name.
        split: whether input and weight gradients ran apart.
        stages: number of stages.
        microbatches: microbatches in a step.
        median_s: median seconds of a step: forward, backward, optimizer, until all ranks are done.
        spread_s: interquartile range of the same.
        tokens_per_s: tokens (samples where there are none) in a step by ``median_s``.
        speedup: median over the alternating pairs of fused time / this row's time; 1 for fused.
        ideal_speedup: the same from simulated steps with the durations measured in this run.
        bubble: idle share of the ranks' time between first start and last end, measured.
        ideal_bubble: the same, simulated with the durations measured in this run.
        peak_bytes: per rank, the most bytes of tensors at any time of forward and backward.
        max_grad_diff: largest difference from gradients of single-process autograd, of the whole
            model; None where those differ from call to call, as with dropout.
        first_loss: mean loss of the first step.
        last_loss: mean loss of the last step.
        durations_s: action kind -> median seconds, by stage.
    """

    schedule: str
    split: bool
    stages: int
    microbatches: int
    median_s: float
    spread_s: float
    tokens_per_s: float
    speedup: float
    ideal_speedup: float
    bubble: float
    ideal_bubble: float
    peak_bytes: list[int]
    max_grad_diff: float | None
    first_loss: float
    last_loss: float
    durations_s: dict[str, list[float]]

    @property
    def title(self) -> str:
        return f"{self.schedule} {'split' if self.split else 'fused'}, M={self.microbatches}"

    @property
    def is_noise(self) -> bool:
        """Whether the time that splitting gains or costs is no more than the steps' spread."""
        return self.split and abs(self.speedup - 1) * self.median_s <= self.spread_s


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Rows, and for each the step whose time is nearest to the median, and the ideal one.

    The ideal is simulated from the row's median durations: no transfer takes time, nothing waits
    for anything but its input.
    """

    rows: list[Row]
    timelines: list[Timeline]
    ideals: list[Timeline]


_HEADERS = (
    "schedule",
    "M",
    "backward",
    "step ms",
    "spread ms",
    "tokens/s",
    "speed-up",
    "ideal",
    "bubble",
    "ideal bubble",
    "peak memory by rank",
    "grad diff",
    "loss",
)


def comparison_table(rows: Sequence[Row], style: str = "simple") -> str:
    """A row each; times are medians, the spread is the interquartile range."""
    align = ("left", "right", "left", *["right"] * 7, "left", "right", "left")
    table = [_cells(row) for row in rows]
    return tabulate(table, _HEADERS, tablefmt=style, colalign=align, disable_numparse=True)


def durations_table(rows: Sequence[Row], style: str = "simple") -> str:
    """Median milliseconds of every kind of action, stage by stage."""
    table = [
        [row.schedule, str(row.microbatches), "split" if row.split else "fused", kind]
        + [f"{1e3 * seconds:.1f}" for seconds in by_stage]
        for row in rows
        for kind, by_stage in row.durations_s.items()
    ]
    stages = max((row.stages for row in rows), default=0)
    headers = ["schedule", "M", "backward", "action", *(f"stage {n} ms" for n in range(stages))]
    align = ("left", "right", "left", "left", *["right"] * stages)
    return tabulate(table, headers, tablefmt=style, colalign=align, disable_numparse=True)


def _cells(row: Row) -> list[str]:
    return [
        row.schedule,
        str(row.microbatches),
        "split" if row.split else "fused",
        f"{1e3 * row.median_s:.1f}",
        f"{1e3 * row.spread_s:.1f}",
        f"{row.tokens_per_s:.0f}",
        f"{'~' * row.is_noise}{row.speedup:.3f}x",
        f"{row.ideal_speedup:.3f}x",
        f"{row.bubble:.1%}",
        f"{row.ideal_bubble:.1%}",
        ", ".join(map(size_text, row.peak_bytes)),
        "random" if row.max_grad_diff is None else f"{row.max_grad_diff:.2g}",
        f"{row.first_loss:.4f} -> {row.last_loss:.4f}",
    ]
