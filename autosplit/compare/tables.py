"""``Row``: one row of a comparison, and the tables of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tabulate import tabulate

from autosplit.text.figures import size_text


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the comparison: one backward, fused or split, under one schedule.

    Attributes:
        schedule: name of the schedule; for ``"auto"``, with the placement of weight gradients that
            was found.
        split: whether the backward was split into I and W.
        stages: number of stages.
        microbatches: microbatches in a step.
        median_s: median seconds of a step, from its start until all ranks have run the optimizer.
        spread_s: interquartile range of the steps' seconds.
        speedup: median over the alternating pairs of fused time / this row's time; 1 for fused.
        ideal_speedup: the speed-up of simulated steps with the durations measured in this run.
        bubble: measured idle share of the ranks' time between the first start and the last end.
        ideal_bubble: the idle share of simulated steps with the durations measured in this run.
        peak_bytes: per rank, the most bytes of tensors at any time of forward and backward.
        max_grad_diff: largest difference from the whole model's gradients under autograd in one
            process; None if these differ from call to call, as with dropout.
        durations_s: maps each kind of action to the median seconds of each stage.
        drawn_step: the number of the timed step that the row's timeline shows, from 1.
        samples: samples in a step; None if unknown.
        tokens: elements of the step's first integer tensor, such as token ids; None without such a
            tensor.
    """

    schedule: str
    split: bool
    stages: int
    microbatches: int
    median_s: float
    spread_s: float
    speedup: float
    ideal_speedup: float
    bubble: float
    ideal_bubble: float
    peak_bytes: list[int]
    max_grad_diff: float | None
    durations_s: dict[str, list[float]]
    drawn_step: int = 0
    samples: int | None = None
    tokens: int | None = None

    @property
    def title(self) -> str:
        return f"{self.schedule} {'split' if self.split else 'fused'}, M={self.microbatches}"

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second in the median step; None if their number is unknown."""
        return None if self.samples is None else self.samples / self.median_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second in the median step; None if the inputs have no integer tensor."""
        return None if self.tokens is None else self.tokens / self.median_s

    @property
    def is_noise(self) -> bool:
        """Whether the time that splitting gains or costs is within the steps' spread."""
        return self.split and abs(self.speedup - 1) * self.median_s <= self.spread_s


_HEADERS = (
    "schedule",
    "M",
    "backward",
    "speed-up",
    "samples/s",
    "tokens/s",
    "step ms",
    "spread ms",
    "ideal",
    "bubble",
    "ideal bubble",
    "peak memory by rank",
    "grad diff",
)


def comparison_table(rows: Sequence[Row], style: str = "simple") -> str:
    """Table with one row per ``Row``; times are medians, the spread is the interquartile range."""
    align = ["left", "right", "left", *["right"] * 8, "left", "right"]
    table = [[*_HEADERS], *map(_cells, rows)]
    unknown = {"samples/s": "samples", "tokens/s": "tokens"}
    for header, attribute in unknown.items():
        if all(getattr(row, attribute) is None for row in rows):
            column = table[0].index(header)
            for line in (align, *table):
                del line[column]
    headers, *table = table
    return tabulate(table, headers, tablefmt=style, colalign=align, disable_numparse=True)


def _cells(row: Row) -> list[str]:
    return [
        row.schedule,
        str(row.microbatches),
        "split" if row.split else "fused",
        f"{'~' * row.is_noise}{row.speedup:.3f}x",
        "" if row.samples_per_s is None else f"{row.samples_per_s:,.1f}",
        "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        f"{1e3 * row.median_s:.1f}",
        f"{1e3 * row.spread_s:.1f}",
        f"{row.ideal_speedup:.3f}x",
        f"{row.bubble:.1%}",
        f"{row.ideal_bubble:.1%}",
        ", ".join(map(size_text, row.peak_bytes)),
        "random" if row.max_grad_diff is None else f"{row.max_grad_diff:.2g}",
    ]


def durations_table(rows: Sequence[Row], style: str = "simple") -> str:
    """Table of the median milliseconds of every kind of action, by stage."""
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
