"""Lists of names for a sentence or a table cell."""

from __future__ import annotations

from collections.abc import Sequence


def few(names: Sequence[str], shown: int = 1) -> str:
    """The first names, and how many more there are; nothing where there are none."""
    first = ", ".join(names[:shown])
    return f"{first} and {len(names) - shown} more" if len(names) > shown else first
