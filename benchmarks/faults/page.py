"""The page of what came of all faults, and a process for each."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..page import Page, Part, option
from ..results import Results, Rows, sources, table
from .cells import CAUSES, LAUNCHERS, PLACES, RANKS, Cell, cells, places_of

HERE = pathlib.Path(__file__).parent
TEMPLATE = """\
# Faults of one rank

Written by `python -m benchmarks.faults`; do not edit. {environment}.
{sections}
Measure again: `{commands}`.
"""
_ABOUT = """\
One of the ranks that train a small pipeline has a fault: it is killed (SIGKILL) or stopped
(SIGSTOP), raises an error, exits (`os._exit(3)`), sleeps, leaves its function early, or its batches
end before those of the others. It happens while it builds or compiles its stages, in an F, an I or
a W, in the optimizer's step, or between steps. Then every other rank must end with an error that
names that rank and the cause, `launch` must name both too, no process may run on, and no shared
memory, temporary file or listening port may be left."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Which faults are tried."""

    select: str = option("", "only faults whose name matches this pattern")
    timeout: float = option(8.0, "seconds, for stops and sleeps")
    jobs: int = option(1, "faults at a time")
    resume: bool = option(False, "skip what was good with the same sources")


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each fault, in a process of its own, so that none sees what another left."""
    known = Results.read(HERE / "results.json").rows("faults") if settings.resume else []
    done = {row["name"] for row in known if row["good"] and row["sources"] == sources()}
    wanted = [c for c in cells() if re.search(settings.select, c.name) and c.name not in done]
    with ThreadPoolExecutor(settings.jobs) as pool:
        yield from pool.map(lambda cell: _apart(cell, settings.timeout), wanted)


def _apart(cell: Cell, timeout: float) -> dict[str, Any]:
    one = json.dumps(dataclasses.asdict(cell))
    command = [sys.executable, "-m", "benchmarks.faults.judge", one, str(timeout)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{cell.name}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def render(rows: Rows) -> str:
    """How many came out well, and each."""
    quick = sorted(row["seconds"] for row in rows if not row["waits"] and row["named"])
    wrong = [f"- {row['name']}: {'; '.join(_complaints(row))}" for row in rows if not row["good"]]
    good, survivors = sum(r["good"] for r in rows), sum(r["ranks"] - 1 for r in rows)
    named, silent = (sum(row[key] for row in rows) for key in ("named", "silent"))
    tables = "\n".join(_table(rows, launcher, ranks) for launcher in LAUNCHERS for ranks in RANKS)
    return f"""\
**{good} of {len(rows)} faults** came out so; of {survivors} survivors {named} named rank and cause,
and torchrun's agent ended {silent} before they had said anything. From a fault that ends a rank to
the last survivor's error it took {quick[len(quick) // 2]:.2f} s in the median and {quick[-1]:.2f} s
at most; stops and sleeps are noticed at the timeout, here {max(r["timeout"] for r in rows):g} s.

Each cell has the survivors that named rank and cause, of those that said anything, and the seconds
until the last did.

{tables}""" + "".join(f"\n{each}" for each in wrong)


def _table(rows: Rows, launcher: str, ranks: int) -> str:
    known = {row["name"]: row for row in rows}
    lines = []
    for fault in CAUSES:
        cells = [_cell(known.get(f"{launcher} {ranks} {fault} {place}")) for place in PLACES]
        there = [place in places_of(fault) for place in PLACES]
        lines.append([fault, *(c if t else "" for c, t in zip(cells, there, strict=True))])
    return f"### {ranks} ranks, {launcher}\n\n{table(['', *PLACES], lines)}\n"


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


PAGE = Page(
    "faults",
    TEMPLATE,
    {"faults": Part("What every rank says", _ABOUT, measure, render)},
    Settings,
)
