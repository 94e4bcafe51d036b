"""How many tests of each folder passed, for runs on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tabulate import tabulate

_WORDS = ("passed", "failed", "error", "skipped")


def by_folder(outcomes: Mapping[str, Iterable[Any]]) -> str:
    """A table, with a row for each folder of ``tests/`` and their sums below.

    Args:
        outcomes: reports of pytest, by its word for what came of a test.
    """
    counts = {
        word: Counter(_folder(item.nodeid) for item in outcomes.get(word, ())) for word in _WORDS
    }
    folders = sorted(set().union(*counts.values()))
    rows = [[folder, *(counts[word][folder] for word in _WORDS)] for folder in folders]
    rows.append(["all", *(counts[word].total() for word in _WORDS)])
    return str(tabulate(rows, ["folder", *_WORDS]))


def _folder(test: str) -> str:
    path = test.split("::")[0].split("/")
    return path[1] if len(path) > 2 else path[-1]
