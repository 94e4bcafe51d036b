"""Fused against split, alternating within one run of two real ranks."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from autosplit.compare.run import Settings, compare
from autosplit.compare.tables import Row, comparison_table, durations_table
from autosplit.report import draw_timelines

from ..results import Rows, table


def measure(steps: int) -> Rows:
    """Train the decoder with both backwards; leaves the timelines of the run beside the page."""
    cases = [("1f1b", 2), ("1f1b", 4)]
    settings = Settings("examples.models:llama", {}, stages=2, ranks=2, cases=cases, steps=steps)
    results = compare(settings)
    if results is None:
        raise SystemExit("run this without torchrun")
    shown = [(row.title, timeline) for row, timeline, _ in results]
    draw_timelines(shown, pathlib.Path(__file__).parent / "timeline.png")
    return [{"name": row.title, **dataclasses.asdict(row)} for row, *_ in results]


def render(rows: Rows) -> str:
    """The comparison, how near it came to its ideal, the picture, and every duration."""
    found = [_row(row) for row in rows]
    reached = [
        [
            f"{row.schedule}, M={row.microbatches}",
            f"{row.speedup:.3f}x",
            f"{row.ideal_speedup:.3f}x",
            f"{row.speedup / row.ideal_speedup:.1%}",
        ]
        for row in found
        if row.split
    ]
    return "\n\n".join(
        [
            comparison_table(found, "github"),
            table(["schedule", "speed-up", "ideal", "reached"], reached),
            "![timelines](timeline.png)",
            "Median duration of each action:",
            durations_table(found, "github"),
        ]
    )


def _row(row: dict[str, Any]) -> Row:
    names = {field.name for field in dataclasses.fields(Row)}
    return Row(**{name: value for name, value in row.items() if name in names})
