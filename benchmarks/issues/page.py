"""The page of what came of all reproducers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..results import Results, Rows, table
from .case import ABSENT, FAILS, RIGHT, Case

PAGE = """# What people report about pipelining

Written by `python -m benchmarks.issues`; do not edit. {environment}.

Threads about pipelines and split backwards, each rebuilt as it is told: on Gloo, a process a rank,
once with torch alone and once with autosplit. A row asserts what it shows: that stock torch fails
with what was reported (or does so no more), and that autosplit gives the right result. `stage` is
`autosplit.pipelining.SplitPipelineStage` in place of torch's under the same schedule of torch's,
`engine` is autosplit's own `PipelineTrainer`.

Of {count} rows, {rebuilt} can be rebuilt with stock torch {version}, where {fails} fail and {fixed}
are right by now; with autosplit {right} of {runs} are right{unsolved}.

{table}
{other}
{wrong}Run again: `{command}`; under another version of torch it adds a column to the second table.
One row: `{command} {example}`.
"""

OPEN = '<span style="color:red">&#x1F534; **open**</span>'
_OTHER = """
## Stock torch, by version

{table}
"""


def render(results: Results, cases: Mapping[str, Case]) -> str:
    """The page, for the version that was run last with all of it."""
    version = max(results.parts, key=lambda name: (len(results.rows(name)), _key(name)))
    part = results.parts[version]
    rows = [row for row in results.rows(version) if row["name"] in cases]
    rows.sort(key=lambda row: list(cases).index(row["name"]))
    stock, ours = ([row[side]["state"] for row in rows] for side in ("stock", "ours"))
    unsolved = sum(row["ours"]["state"] == FAILS and row["ours"]["claimed"] for row in rows)
    wrong = [
        f"- {row['name']}, {side}: {row[side]['text']}\n"
        for row in rows
        for side in ("stock", "ours")
        if not row[side]["claimed"]
    ]
    return PAGE.format(
        environment=part["environment"],
        version=version,
        count=len(rows),
        rebuilt=len(rows) - stock.count(ABSENT),
        fails=stock.count(FAILS),
        fixed=stock.count(RIGHT),
        right=ours.count(RIGHT),
        runs=len(rows) - ours.count(ABSENT),
        unsolved=f", and {unsolved} open" if unsolved else "",
        table=table(
            ["thread", "reported", f"stock torch {version}", "", "autosplit"],
            [_line(cases[row["name"]], row, version) for row in rows],
        ),
        other=_by_version(results, rows, cases),
        wrong="".join(["Not as claimed:\n\n", *wrong, "\n"]) if wrong else "",
        command="python -m benchmarks.issues",
        example=rows[0]["name"] if rows else "NAME",
    )


def _line(case: Case, row: dict[str, Any], version: str) -> list[str]:
    threads = ", ".join(each.link for each in case.threads)
    stock, ours = row["stock"], row["ours"]
    is_open = ours["state"] == FAILS and ours["claimed"]
    state = f"{OPEN}: {_text(ours)}" if is_open else _cell(ours)
    by = "" if ours["state"] == ABSENT else case.by
    return [threads, case.reported, _cell(stock) + _fixed(case, stock, version), by, state]


def _fixed(case: Case, stock: dict[str, Any], version: str) -> str:
    if stock["state"] != RIGHT or case.fixed is None:
        return ""
    return f" (fixed by torch {'.'.join(map(str, case.fixed))})"


def _cell(side: dict[str, Any]) -> str:
    claimed = "" if side["claimed"] else "**NOT AS CLAIMED**, "
    return f"{claimed}**{side['state']}**: {_text(side)}"


def _text(side: dict[str, Any]) -> str:
    """Short, and no Markdown of its own."""
    text = str(side["text"])
    text = text if len(text) <= 160 else text[:157].rpartition(" ")[0] + " ..."
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _by_version(results: Results, rows: Rows, cases: Mapping[str, Case]) -> str:
    """Where there is more than one."""
    versions = sorted(results.parts, key=_key)
    if len(versions) < 2:
        return ""
    found = {name: {row["name"]: row for row in results.rows(name)} for name in versions}
    lines = []
    for row in rows:
        if row["stock"]["state"] == ABSENT:
            continue
        states = [found[version].get(row["name"]) for version in versions]
        if sum(state is not None for state in states) < 2:
            continue
        threads = ", ".join(each.link for each in cases[row["name"]].threads)
        lines.append([threads, *("not run" if s is None else s["stock"]["state"] for s in states)])
    return _OTHER.format(table=table(["thread", *versions], lines))


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
