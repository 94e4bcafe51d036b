"""Findings as rows of ``results.json``, and tables of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..results import Rows, table
from .examine import Finding, Verdict

PARTLY, HUNG = "partly split", "HUNG"
EQUAL, CLOSE = Verdict.EQUAL.value, Verdict.CLOSE.value
GOOD = {EQUAL, CLOSE, PARTLY}
COLUMNS = [EQUAL, CLOSE, PARTLY, *(each.value for each in Verdict), HUNG]
COLUMNS = [*dict.fromkeys(COLUMNS)]
_LONGEST = 300


def row(finding: Finding, group: str, library: str = "") -> dict[str, Any]:
    """A finding as it is written; what is empty is left out."""
    found = {
        "name": finding.name,
        "group": group,
        "verdict": finding.verdict.value,
        "in_parts": finding.in_parts,
        "detail": finding.detail,
        "share": finding.share,
        "library": library,
    }
    return {key: value for key, value in found.items() if value or key == "share"}


def tally(name: str, findings: Iterable[Finding]) -> dict[str, Any]:
    """Many findings as one row: how many of each, and those that are bad one by one."""
    found: dict[str, Any] = {"name": name, "verdicts": Counter(), "in_parts": 0}
    found |= {"refusals": Counter(), "no_backward": Counter(), "failures": {}}
    for each in findings:
        found["verdicts"][each.verdict.value] += 1
        found["in_parts"] += each.in_parts
        if each.verdict is Verdict.REFUSED:
            found["refusals"][each.detail] += 1
        elif each.verdict is Verdict.NO_BACKWARD:
            found["no_backward"][each.detail] += 1
        elif each.verdict in (Verdict.WRONG, Verdict.CRASHED):
            found["failures"][each.name] = f"{each.verdict.value}: {each.detail}"
    return found


def is_good(found: dict[str, Any]) -> bool:
    return not found["failures"] if "failures" in found else category(found) in GOOD


def category(found: dict[str, Any]) -> str:
    """The column a row counts in."""
    verdict = str(found["verdict"])
    return PARTLY if verdict in (EQUAL, CLOSE) and found.get("in_parts") else verdict


def group(rows: Iterable[dict[str, Any]]) -> dict[str, Rows]:
    """Rows by group, in the order in which groups come first."""
    found: dict[str, Rows] = {}
    for each in rows:
        found.setdefault(each["group"], []).append(each)
    return found


def counts(rows: Rows) -> Counter[str]:
    """How many of each category, of rows of one case or of many."""
    found: Counter[str] = Counter()
    for each in rows:
        found.update(each["verdicts"] if "verdicts" in each else [category(each)])
    return found


def counted(lines: dict[str, Counter[str]]) -> str:
    """A table of counts by name; of columns, those that have any."""
    named = [each for each in COLUMNS if any(line[each] for line in lines.values())]
    body = [
        [name, line.total(), *(line[each] or "" for each in named)] for name, line in lines.items()
    ]
    return table(["cases", "in all", *named], body)


def by_group(rows: Rows) -> str:
    """Those groups that have others than equal cases, and each case that is not in one graph."""
    lines = {name: counts(each) for name, each in group(rows).items()}
    lines = {name: line for name, line in lines.items() if line[EQUAL] < line.total()}
    found = [row for row in rows if category(row) not in (EQUAL, CLOSE)]
    listing = [[row["name"], category(row), brief(row.get("detail", ""))] for row in found]
    return f"{counted(lines)}\n\n{table(['case', 'result', 'why'], listing)}" if lines else ""


def in_all(rows: Rows) -> str:
    """Rows of many cases each: all reasons, and all failures."""
    parts = sum(each["in_parts"] for each in rows)
    found = [f"{counts(rows).total()} cases of {len(rows)} kinds, {parts} of them in parts."]
    for key, title in {"refusals": "refused because", "no_backward": "no backward"}.items():
        reasons: Counter[str] = sum((Counter(each.get(key)) for each in rows), Counter())
        if reasons:
            body = [[count, brief(reason)] for reason, count in reasons.most_common()]
            found.append(table(["cases", title], body))
    failures = {case: why for each in rows for case, why in each["failures"].items()}
    found += [f"{why}\n\n```python\n{case}\n```" for case, why in failures.items()]
    return "\n\n".join(found)


def brief(detail: str) -> str:
    text = detail.replace("|", "/").replace("\n", " ")
    return text if len(text) < _LONGEST else text[:_LONGEST] + " ..."
