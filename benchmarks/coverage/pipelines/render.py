"""The table of architectures trained in stages."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...results import Rows, table
from ..examine import Verdict
from ..results import group

HUNG = "HUNG"
GOOD = (Verdict.EQUAL.value, Verdict.CLOSE.value)
_COLUMNS = [
    *GOOD,
    Verdict.REFUSED.value,
    Verdict.WRONG.value,
    Verdict.CRASHED.value,
    HUNG,
    Verdict.NO_BACKWARD.value,
]
_LONGEST = 300


def render(rows: Rows) -> str:
    """Outcomes by family, then what did not come out equal, with why."""
    if not rows:
        return "Not run."
    cells = [_cells(family, each) for family, each in group(rows).items()]
    cells.append(_cells("**all**", rows))
    listed = [
        [row["name"], row["verdict"], _brief(row.get("detail", ""))]
        for row in rows
        if row["verdict"] not in GOOD
    ]
    good = sum(row["verdict"] in GOOD for row in rows)
    lines = [
        f"{good} of {len(rows)} come out equal.",
        table(["family", "in all", *_COLUMNS], cells),
    ]
    if listed:
        lines.append(table(["architecture", "result", "why"], listed))
    return "\n\n".join(lines)


def _cells(name: str, rows: Rows) -> list[Any]:
    counts = Counter(row["verdict"] for row in rows)
    return [name, len(rows), *(counts[column] or "" for column in _COLUMNS)]


def _brief(detail: str) -> str:
    text = detail.replace("|", "/").replace("\n", " ")
    return text if len(text) < _LONGEST else text[:_LONGEST] + " ..."
