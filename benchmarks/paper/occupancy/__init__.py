"""Shares of F, I and W, in a stage by itself and in a step."""

from __future__ import annotations

from collections.abc import Mapping

from ...results import Rows, table
from ..cells import pair

PUBLISHED = ((18.5, 18.1, 9.3), (29.7, 29.4, 19.9))
"""Milliseconds of F, I and W of a stage on an A100 (Qi et al., 1.5B and 6.2B parameters)."""


def render(rows: Mapping[str, Rows]) -> str:
    """Two tables: a middle stage, then what the ranks do in a step of 1F1B-1."""
    stages = [
        [
            row["name"],
            *(f"{row['ms'][kind]:.1f}" for kind in "FIW"),
            _shares(row["ms"]),
            f"{row['ms']['W'] / row['ms']['F']:.2f}",
            f"{(row['ms']['I'] + row['ms']['W']) / row['backward_ms']:.3f}",
            f"{row['deferred'] / row['saved']:.2f}",
        ]
        for row in rows["stages"]
    ]
    published = "; ".join(_shares(dict(zip("FIW", each, strict=True))) for each in PUBLISHED)
    headers = ["family", "F ms", "I ms", "W ms", "shares", "W / F", "(I + W) / backward"]
    return f"""\
The middle one of three stages that are cut by measured cost, alone on one core. The last column is
what I hands to W over what F keeps, in bytes.

{table([*headers, "deferred / saved"], stages)}

On A100s (Qi et al.): {published}.

What the ranks do in a step of 1F1B-1, split, on two processes; the first stage has no I, its W is
the whole backward.

{table(["family", "rank", "F", "I", "W", "idle"], _steps(rows["cells"]))}"""


def _shares(ms: Mapping[str, float]) -> str:
    total = sum(ms[kind] for kind in "FIW")
    return " : ".join(f"{ms[kind] / total:.0%}" for kind in "FIW")


def _steps(rows: Rows) -> list[list[str]]:
    cells = []
    for cell in pair(rows):
        if cell.label != "1F1B-1":
            continue
        durations, count = cell.split["durations_s"], cell.split["microbatches"]
        ranks = range(cell.split["stages"])
        busy = sum(count * each for times in durations.values() for each in times)
        total = busy / (1.0 - cell.split["bubble"]) / len(ranks)
        for rank in ranks:
            shares = [count * durations[kind][rank] / total for kind in "FIW"]
            shares.append(1.0 - sum(shares))
            cells.append([cell.family, str(rank), *(f"{max(each, 0.0):.0%}" for each in shares)])
    return cells
