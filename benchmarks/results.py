"""What a benchmark found, kept in ``results.json`` so that its page can be made part by part.

Tables of it, and targets beside figures.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tabulate import tabulate

import autosplit

Rows = list[dict[str, Any]]


@dataclasses.dataclass
class Results:
    """Parts by name, each with the command and environment it was run with, and its rows."""

    path: pathlib.Path
    parts: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: pathlib.Path) -> Results:
        return cls(path, json.loads(path.read_text()) if path.exists() else {})

    def update(self, part: str, rows: Rows, command: str, environment: str) -> None:
        """Replace the part's rows of the same names, keep its others, and write the file."""
        self.parts = Results.read(self.path).parts  # another part may have been run meanwhile
        known = {row["name"]: row for row in self.parts.get(part, {}).get("rows", [])}
        known |= {row["name"]: {**row, "sources": sources()} for row in rows}
        commands = self.parts.get(part, {}).get("commands", [])
        self.parts[part] = {
            "environment": environment,
            "commands": [*(line for line in commands if line != command), command],
            "rows": list(known.values()),
        }
        self.path.write_text(json.dumps(self.parts, indent=1) + "\n")

    def rows(self, part: str) -> Rows:
        found: Rows = self.parts.get(part, {}).get("rows", [])
        return found


@functools.cache
def sources() -> str:
    """Names the state of autosplit's sources that a row was found with."""
    package = pathlib.Path(autosplit.__file__).parent
    files = sorted({*package.rglob("*.py"), *(package / "passes").resolve().glob("*.py")})
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def describe(settings: object = None) -> str:
    """What a figure was measured on, in a line that does not name the machine: versions, processor
    count, and the most ``threads`` of its settings, one where they have none.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {cores} cores, device {device}, "
        f"{max(getattr(settings, 'threads', (1,)))} thread(s) a process"
    )


def ratios(mine: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """Of each pair of measurements that were taken one after the other."""
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def mark(text: str, met: bool) -> str:
    """In bold where a target is not met."""
    return text if met else f"**{text}**"


def by_setting(rows: Rows, render: Callable[[Rows], str]) -> str:
    """Under a heading each, what is said of rows whose names begin with one setting and a colon."""
    settings: dict[str, Rows] = {}
    for row in rows:
        settings.setdefault(row["name"].partition(": ")[0], []).append(row)
    return "\n\n".join(f"### {name}\n\n{render(own)}" for name, own in settings.items())


def table(headers: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; every cell is the text that it is given as."""
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


@dataclasses.dataclass(frozen=True)
class Target:
    """What a figure should be.

    Attributes:
        name: of the figure.
        at_most: upper limit, if any.
        at_least: lower limit, if any.
        style: how the figure is written.
    """

    name: str
    at_most: float | None = None
    at_least: float | None = None
    style: str = ".3f"

    @property
    def title(self) -> str:
        """Name and limit, as the head of a column."""
        return f"{self.name} ({self.limit})"

    @property
    def limit(self) -> str:
        if self.at_most is not None:
            return f"≤ {self.at_most:{self.style}}"
        return f"≥ {self.at_least:{self.style}}"

    def met(self, figure: float) -> bool:
        """Compared as written: what the reader sees decides."""
        shown = float(f"{figure:{self.style}}".rstrip("%"))
        scale = 100 if self.style.endswith("%") else 1
        above = self.at_least is None or shown >= scale * self.at_least
        return above and (self.at_most is None or shown <= scale * self.at_most)

    def cell(self, figure: float) -> str:
        return mark(f"{figure:{self.style}}", self.met(figure))


def verdicts(figures: Sequence[tuple[Target, Mapping[str, float]]]) -> str:
    """One sentence: which targets are met everywhere, and where each other is missed."""
    lines = []
    for target, found in figures:
        missed = [
            f"{name} ({figure:{target.style}})"
            for name, figure in found.items()
            if not target.met(figure)
        ]
        said = "met everywhere" if not missed else f"missed by {', '.join(missed)}"
        lines.append(f"Target {target.name} {target.limit}: {said}.")
    return "\n".join(lines)
