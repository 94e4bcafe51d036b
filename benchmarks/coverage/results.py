"""Findings as rows of ``results.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..results import Rows
from .examine import Finding, Verdict


def row(finding: Finding, group: str) -> dict[str, Any]:
    """A finding as it is written; what is empty is left out."""
    found = {
        "name": finding.name,
        "group": group,
        "verdict": finding.verdict.value,
        "in_parts": finding.in_parts,
        "detail": finding.detail,
        "share": finding.share,
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


def group(rows: Iterable[dict[str, Any]]) -> dict[str, Rows]:
    """Rows by group, in the order in which groups come first."""
    found: dict[str, Rows] = {}
    for each in rows:
        found.setdefault(each["group"], []).append(each)
    return found
