"""What a benchmark found, kept in ``results.json`` so that its page can be made part by part."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

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


def table(headers: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; every cell is the text that it is given as."""
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)
