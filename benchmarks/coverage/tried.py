"""``docs/tried.md``: kinds of code, libraries and models that were tried, and what came of each."""

from __future__ import annotations

from typing import Any

from ..results import Results, Rows, table
from .examine import Verdict
from .pieces import PIECES
from .rows import group

TEMPLATE = """\
# What was tried

Written by `python -m benchmarks.coverage`; do not edit. Each case runs split, and beside it under
plain autograd, from the same seed: two microbatches, and one more behind a step of descent.
Outputs, all gradients, buffers and random numbers are compared. How, and all cases one by one:
`benchmarks/coverage`. What does not hold, and what to do: [limitations](limitations.md).

*Bit for bit*: equal. *Within rounding*: other kernels ran, and the error against float64 is of the
size of plain autograd's own. *In parts*: in several graphs, with ordinary autograd between them.
*Waits*: of the elements of weight gradients, how many W computes; the rest comes in `backward()`.

## Kinds of code

Small programs, in `benchmarks/coverage/pieces`. {environment}.

{pieces}

## Models of libraries

{models}

## torch's own databases

{databases}
"""
SAID = {Verdict.EQUAL.value: "bit for bit", Verdict.CLOSE.value: "within rounding"}


def render(results: Results, _: str = "") -> str:
    """The page, whatever it was."""
    found = results.parts.get("pieces", {})
    return TEMPLATE.format(
        environment=found.get("environment", "Not run"),
        pieces=_pieces({row["name"]: row for row in found.get("rows", [])}),
        models=_models([*results.rows("transformers"), *results.rows("libraries")]),
        databases=_databases(results),
    )


def _pieces(rows: dict[str, dict[str, Any]]) -> str:
    cells = [
        [name, each.about, _share([rows[name]]), _graphs(rows[name]), _verdict(rows[name])]
        for name, each in PIECES.items()
        if name in rows
    ]
    return table(["", "what", "waits", "graphs", "against autograd"], cells)


def _models(rows: Rows) -> str:
    cells = []
    for family, each in group(rows).items():
        names = dict.fromkeys(row["name"].split()[0] for row in each)
        library = next((row["library"] for row in each if "library" in row), "transformers")
        cells.append([library, family, ", ".join(names), _share(each), *_counts(each)])
    return table(["library", "family", "models", "waits", *COUNTED], cells)


COUNTED = ("cases", "bit for bit", "within rounding", "in parts")


def _counts(rows: Rows) -> list[Any]:
    said = [_verdict(row) for row in rows]
    parts = sum(bool(row.get("in_parts")) for row in rows)
    return [len(rows), *(said.count(each) for each in SAID.values()), parts]


def _databases(results: Results) -> str:
    cells = []
    if rows := results.rows("modules"):
        cells.append([f"{len(group(rows))} entries of `module_db`", *_counts(rows)])
    if rows := results.rows("opinfo"):
        verdicts = [(kind, n) for row in rows for kind, n in row["verdicts"].items()]
        counts = [sum(n for kind, n in verdicts if kind == each) for each in SAID]
        parts = sum(row["in_parts"] for row in rows)
        every = sum(n for _, n in verdicts)
        cells.append([f"{len(rows)} operators of `op_db` and others", every, *counts, parts])
    return table(["", *COUNTED], cells)


def _share(rows: Rows) -> str:
    """The least of the rows' shares; nothing where none is known."""
    known = [row["share"] for row in rows if row.get("share") is not None]
    return f"{min(known):.0%}" if known else ""


def _graphs(row: dict[str, Any]) -> str:
    return "in parts" if row.get("in_parts") else "one"


def _verdict(row: dict[str, Any]) -> str:
    return SAID.get(row["verdict"], str(row["verdict"]))
