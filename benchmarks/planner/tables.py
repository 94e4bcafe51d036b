"""What ``automatic`` found, as tables."""

from __future__ import annotations

import statistics
from typing import Any

from autosplit.text.figures import quartiles

from ..results import Rows, mark, ratios, table
from .models import CASES

EVEN = 1.05
LOPSIDED = 1.15
WAYS = ("automatic", "by hand")


def render_steps(rows: Rows) -> str:
    """Automatic cuts against those by hand."""
    cells = [_step(row) for row in rows]
    headers = [
        "model",
        "blocks",
        "stage 1 by hand",
        "automatic",
        "by hand ms",
        "automatic ms",
        "automatic / by hand",
        "spread",
        "cut from estimates",
    ]
    about = f"""\
Target: at most 1.00; at most {1 / LOPSIDED:.2f} ({LOPSIDED}x better) for the lopsided models, the
last two. Where both cuts are the same there is nothing to compare."""
    return f"{table(headers, cells)}\n\n{about}"


def render_predictions(rows: Rows) -> str:
    """The plans' predictions against what was measured."""
    cells = [_prediction(row, way) for row in rows for way in WAYS if way in row]
    headers = [
        "model",
        "cut",
        "predicted ms",
        "measured ms",
        "predicted / measured",
        "slowest / mean stage",
        "most even cut",
        "its step",
    ]
    errors = [abs(_ratio(row[way]) - 1.0) for row in rows for way in WAYS if way in row]
    about = f"""\
Error of what was predicted, with what the machine did otherwise since: median
{statistics.median(errors):.1%}, largest {max(errors):.1%}. Target for the automatic cuts'
slowest / mean stage: {EVEN}, where the blocks allow it: *most even cut* is the least that any cut
of these blocks is predicted to have, and *its step* what such a step is predicted to take over one
of the cut in the row: the shortest step is what is looked for."""
    return f"{table(headers, cells)}\n\n{about}"


def render_stages(rows: Rows) -> str:
    """F, I and W of stages: what their blocks add up to, and what was measured."""
    cells = []
    for row in rows:
        found = row["automatic"]
        for stage, measured in enumerate(found["times"]):
            profiled = found["profiled_times"][stage]
            parts = zip(profiled, measured, strict=True)
            cells.append(
                [
                    row["name"],
                    str(stage),
                    *(" / ".join(f"{1e3 * seconds:.1f}" for seconds in part) for part in parts),
                    f"{sum(profiled) / sum(measured):.3f}",
                ]
            )
    return table(["model", "stage", "F ms", "I ms", "W ms", "blocks"], cells)


def _step(row: dict[str, Any]) -> list[str]:
    automatic = row["automatic"]
    names = f"`{automatic['cuts'][0]}`"
    guess = f"`{row['estimated'][0]}`"
    start = [row["name"], f"{row['blocks']} ({row['kinds']} kinds)"]
    if "by hand" not in row:
        median = _ms(automatic["seconds"])
        same = mark("same", row["name"] not in CASES or not CASES[row["name"]].lopsided)
        return [*start, names, names, median, median, same, "", guess]
    ours, theirs = (row["alternating"][way] for way in WAYS)
    low, middle, high = quartiles(ratios(ours, theirs))
    most = 1 / LOPSIDED if CASES[row["name"]].lopsided else 1.0
    return [
        *start,
        f"`{row['by hand']['cuts'][0]}`",
        names,
        _ms(theirs),
        _ms(ours),
        mark(f"{middle:.2f}", round(middle, 2) <= round(most, 2)),
        f"{high - low:.2f}",
        guess,
    ]


def _prediction(row: dict[str, Any], way: str) -> list[str]:
    found = row[way]
    stages = [sum(times) for times in found["times"]]
    uneven = max(stages) / statistics.fmean(stages)
    fine = way != "automatic" or uneven <= EVEN or row["even"] > EVEN
    return [
        row["name"],
        way,
        f"{1e3 * found['profiled']:.0f}",
        _ms(found["seconds"]),
        f"{_ratio(found):.3f}",
        mark(f"{uneven:.3f}", fine),
        f"{row['even']:.3f}",
        f"{row['even_step']:.3f}" if way == "automatic" and "even_step" in row else "",
    ]


def _ratio(found: dict[str, Any]) -> float:
    """Predicted over measured step."""
    return float(found["profiled"] / statistics.median(found["seconds"]))


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f}"
