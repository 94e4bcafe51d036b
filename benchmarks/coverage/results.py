"""Findings as rows of ``results.json``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..results import Rows
from .examine import Finding


def row(finding: Finding, group: str) -> dict[str, Any]:
    """A finding as it is written; what is empty is left out."""
    found = {
        "name": finding.name,
        "group": group,
        "verdict": finding.verdict.value,
        "in_parts": finding.in_parts,
        "detail": finding.detail,
    }
    return {key: value for key, value in found.items() if value}


def group(rows: Iterable[dict[str, Any]]) -> dict[str, Rows]:
    """Rows by group, in the order in which groups come first."""
    found: dict[str, Rows] = {}
    for each in rows:
        found.setdefault(each["group"], []).append(each)
    return found
