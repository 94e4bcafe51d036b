"""The page of what came of all faults."""

from __future__ import annotations

from ..results import Results, Rows, table
from .cells import CAUSES, LAUNCHERS, PLACES, RANKS, places_of

PAGE = """# Faults of one rank

Written by `python -m benchmarks.faults`; do not edit. {environment}.

One of the ranks that train a small pipeline has a fault: it is killed (SIGKILL) or stopped
(SIGSTOP), raises an error, exits (`os._exit(3)`), sleeps, leaves its function early, or its batches
end before those of the others. It happens while it builds or compiles its stages, in an F, an I or
a W, in the optimizer's step, or between steps. Then every other rank must end with an error that
names that rank and the cause, `launch` must name both too, no process may run on, and no shared
memory, temporary file or listening port may be left.

**{good} of {count} faults** came out so; of {survivors} survivors {named} named rank and cause, and
torchrun's agent ended {silent} before they had said anything. From a fault that ends a rank to the
last survivor's error it took {median:.2f} s in the median and {worst:.2f} s at most; stops and
sleeps are noticed at the timeout, here {timeout:g} s.

Each cell has the survivors that named rank and cause, of those that said anything, and the seconds
until the last did.

{tables}
{wrong}
Measure again: `{command}`.
"""


def render(results: Results) -> str:
    """The page."""
    part = results.parts["faults"]
    rows = results.rows("faults")
    quick = sorted(row["seconds"] for row in rows if not row["waits"] and row["named"])
    wrong = [f"- {row['name']}: {'; '.join(_complaints(row))}" for row in rows if not row["good"]]
    return PAGE.format(
        environment=part["environment"],
        good=sum(row["good"] for row in rows),
        count=len(rows),
        survivors=sum(row["ranks"] - 1 for row in rows),
        named=sum(row["named"] for row in rows),
        silent=sum(row["silent"] for row in rows),
        median=quick[len(quick) // 2] if quick else 0.0,
        worst=quick[-1] if quick else 0.0,
        timeout=max((row["timeout"] for row in rows), default=0.0),
        tables="\n".join(
            _table(rows, launcher, ranks) for launcher in LAUNCHERS for ranks in RANKS
        ),
        wrong="".join(["Not as they should be:\n\n", *(f"{each}\n" for each in wrong), "\n"])
        if wrong
        else "",
        command=part["commands"][-1],
    )


def _table(rows: Rows, launcher: str, ranks: int) -> str:
    known = {row["name"]: row for row in rows}
    lines = []
    for fault in CAUSES:
        cells = [_cell(known.get(f"{launcher} {ranks} {fault} {place}")) for place in PLACES]
        there = [place in places_of(fault) for place in PLACES]
        lines.append([fault, *(c if t else "" for c, t in zip(cells, there, strict=True))])
    return f"## {ranks} ranks, {launcher}\n\n{table(['', *PLACES], lines)}\n"


def _cell(row: dict[str, object] | None) -> str:
    if row is None:
        return "not run"
    said = int(str(row["ranks"])) - 1 - int(str(row["silent"]))
    mark = "" if row["good"] else " **WRONG**"
    seconds = f", {row['seconds']:.2f} s" if row["named"] else ""
    return f"{row['named']} of {said}{seconds}{mark}"


def _complaints(row: dict[str, object]) -> list[str]:
    found = list(row["wrong"]) if isinstance(row["wrong"], list) else []
    if row["alive"]:
        found.append(f"{row['alive']} ranks ran on")
    if row["left"]:
        found.append(f"left behind: {row['left']}")
    if row["told"] is False:
        found.append("launch did not name rank and cause")
    return found
