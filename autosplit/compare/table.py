"""The table that ``autosplit compare`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from autosplit.text.figures import size_text

from .settings import Row

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
    headers = [*_HEADERS]
    if any(row.reduction_hidden is not None for row in rows):
        headers.append("reduction hidden")
        align = (*align, "right")
        for cells, row in zip(table, rows, strict=True):
            hidden = row.reduction_hidden
            cells.append("" if hidden is None else f"{hidden:.0%}")
    return tabulate(table, headers, tablefmt=style, colalign=align, disable_numparse=True)


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
        f"{row.speedup:.3f}x",
        f"{row.ideal_speedup:.3f}x",
        f"{row.bubble:.1%}",
        f"{row.ideal_bubble:.1%}",
        ", ".join(map(size_text, row.peak_bytes)),
        f"{row.max_grad_diff:.2g}",
        f"{row.first_loss:.4f} -> {row.last_loss:.4f}",
    ]
