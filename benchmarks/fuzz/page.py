"""Damages files, judges what is read of them, and writes the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..page import Page, Part, option
from ..results import Rows, table
from .judge import LIMIT, Verdict
from .subjects import SUBJECTS
from .sweep import sweep

_PAGE = """\
# Damaged files

Written by `python -m benchmarks.fuzz`. {environment}
{sections}
Again: `{commands}`.
"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How many files."""

    kinds: tuple[str, ...] = option((*SUBJECTS,), "of files", SUBJECTS)
    examples: int = option(3000, "files of each kind")
    seed: int = option(0)


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each kind."""
    for name in settings.kinds:
        found = sweep(SUBJECTS[name](), settings.examples, seed=settings.seed)
        counts = {each.value: found.verdicts[each] for each in Verdict}
        yield {"name": name, **counts, "failure": found.failure}


def render(rows: Rows) -> str:
    """Verdicts by kind, and what failed."""
    kinds = [each.value for each in Verdict]
    cells = [[row["name"], *(f"{row[kind]:,}" for kind in kinds)] for row in rows]
    failures = [f"{row['name']}: {row['failure']}" for row in rows if row["failure"]]
    return "\n\n".join([table(["files", *kinds], cells), *failures])


PAGE = Page(
    "fuzz",
    _PAGE,
    {
        "files": Part(
            "Schedules and plans",
            f"""\
Sound files of schedules (CSV, as torch's) and plans (JSON) are damaged by hypothesis: bytes, cells,
lines and values are deleted, repeated, exchanged, cut off, or replaced by what a slip of the hand,
another program or an attacker might put there. Each is then either read, and compared by other
means with what the file says (the same actions in the same order, every one that is needed once,
simulated to its end, the same when written again; for a plan, its model cut into its stages), or
refused with a typed error. Everything else is a failure: another error, something else read than
the file says, or more than {LIMIT:g} seconds.""",
            measure,
            render,
        )
    },
    Settings,
)
